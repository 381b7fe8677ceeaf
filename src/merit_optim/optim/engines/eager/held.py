"""A weight whose direction needs whole matrices: it is formed once, and held."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from merit_optim.optim.directions import MatrixDirection, Sent
from merit_optim.optim.engines.eager.foreach import EagerPart, store_all
from merit_optim.optim.engines.eager.stored import Block, Stored
from merit_optim.optim.engines.part import Formed
from merit_optim.optim.engines.work import prepared_gradient


class HeldPart(EagerPart):
    """One weight whose direction is formed from whole matrices, and held until the weight is changed."""

    @property
    def stored(self) -> Stored:
        (stored,) = self.all_stored
        assert isinstance(stored, Stored)
        return stored

    @property
    def originals(self) -> list[Tensor]:
        return [self.stored.item.original]

    @property
    def is_cut(self) -> bool:
        return self.stored.share is not None and self.stored.share.is_cut

    def advance(self) -> None:
        direction, step = self.stored.direction, self.stored.item.step
        grads = self.stored.view.cut_matrices(self._grad(), self.stored.item.param.shape)
        for i, (tensors, grad_NRC) in enumerate(zip(self.tensors, grads, strict=True)):
            self._hold(i, *direction.advance(grad_NRC, tensors.state[: len(direction.keys)], step))
        self.measure()

    def before(self) -> list[tuple[Tensor, ...]]:
        """Run the first phase of the direction: return this rank's input to the whole matrices."""
        direction = self._matrix_direction
        old = self.stored.seen[1 : 1 + len(direction.keys)]
        gathered, new = direction.before(self._grad(), tuple(old))
        store_all(old, list(new), self.control.skip)
        return [gathered]

    def after(self, formed: Sequence[Formed]) -> None:
        """Run the last phase of the direction, with what was formed from the whole matrices."""
        direction, share = self._matrix_direction, self.stored.share
        assert share is not None
        (of_weight,) = formed
        extent = share.extents[0]
        traffic = direction.traffic(extent.num_rows, extent.num_columns, self.dtype)
        of_matrices = zip(*map(self._cut_formed, of_weight, traffic.formed), strict=True)
        for i, (tensors, of_matrix, extent) in enumerate(
            zip(self.tensors, of_matrices, share.extents, strict=True)
        ):
            state = tensors.state[: len(direction.keys)]
            self._hold(i, *direction.after(of_matrix, state, self.dtype, extent, self.stored.item.step))
        self.measure()

    @property
    def _matrix_direction(self) -> MatrixDirection:
        direction = self.stored.direction
        assert isinstance(direction, MatrixDirection)
        return direction

    def _grad(self) -> Tensor:
        grad = prepared_gradient(self.stored.item, self.dtype, self.control)
        return self.stored.view.seen(grad, grad.shape)

    def _cut_formed(self, x_NRC: Tensor | None, sent: Sent) -> tuple[Tensor | None, ...]:
        if x_NRC is None:
            return (None,) * len(self.tensors)
        return self.stored.cut_part(x_NRC, like_weight=sent.shape is None)

    def _hold(self, number: int, d_NRC: Tensor | None, state: tuple[Tensor, ...]) -> None:
        tensors = self.tensors[number]
        store_all(list(tensors.state[: len(state)]), list(state), self.control.skip)
        self.tensors[number] = tensors._replace(d=d_NRC)

    def measure(self) -> None:
        """Measure w and u. Without d, this step only prepares, and the weight does not change."""
        self.tensors = [tensors for tensors in self.tensors if tensors.d is not None]
        super().advance()

    def _advance_bucket(self, bucket: list[Block]) -> None:
        """Do nothing: the state of whole matrices is up to date."""
