"""Small models with their exact Hessians."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.func import functional_call

from merit_lab.measure.curvature.hessian import Hessian
from merit_lab.models import LanguageModel, ModelConfig, build


class Case(NamedTuple):
    """A small model, its loss in micro-batches of unequal size, and the Hessian of the whole loss."""

    model: LanguageModel
    hessian: Hessian
    exact: np.ndarray

    @property
    def quadratic(self):
        """The same Hessian as that of a quadratic in float32, whose products take no time."""
        matrix = torch.from_numpy(self.exact).float()
        x = torch.zeros_like(matrix[0], requires_grad=True)
        return Hessian(lambda: [x @ (matrix @ x) / 2], [x])

    @property
    def eigenvalues(self):
        """Ascending."""
        return np.linalg.eigvalsh(self.exact)


@pytest.fixture(scope="session", params=["gpt2", "llama"])
def case(request):
    """In float64, where nothing but the method can be wrong.

    GPT-2 has LayerNorm and tied embeddings, Llama has RMSNorm, rotary positions and SwiGLU.
    """
    sizes = {"width": 8, "heads": 2, "layers": 1, "context": 8, "vocab_size": 12, "hidden": 8}
    config = ModelConfig(family=request.param, attention="math", **sizes)
    torch.manual_seed(1)
    model = build(config)
    sequences = torch.randint(12, (12, 9))
    sequences[:, 1::2] = sequences[:, :-1:2]  # there is something to learn: every other token comes twice
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss_of(model, sequences).backward()
        optimizer.step()
    model.zero_grad()
    model.double()

    def losses():
        for piece in sequences.split([8, 4]):
            yield loss_of(model, piece) * (len(piece) / 12)

    return Case(model, Hessian(losses, model.parameters()), exact_hessian(model, sequences))


def loss_of(model, sequences):
    return model(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()).loss


def exact_hessian(model, sequences):
    """All second derivatives in float64, by torch's own function on the loss in one piece."""
    weights = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    flat = torch.cat([weight.flatten() for weight in weights.values()])
    tokens, targets = sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()

    def loss(vector):
        pieces = vector.split([weight.numel() for weight in weights.values()])
        named = {n: p.view(w.shape) for (n, w), p in zip(weights.items(), pieces, strict=True)}
        return functional_call(model, named, (tokens, targets)).loss

    exact = torch.autograd.functional.hessian(loss, flat, vectorize=True)
    torch.testing.assert_close(exact, exact.T)
    return ((exact + exact.T) / 2).numpy()
