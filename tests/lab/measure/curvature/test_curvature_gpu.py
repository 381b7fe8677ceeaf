"""The same numbers on a GPU as on a CPU."""

import dataclasses

import numpy as np
import pytest
import torch

from merit_lab.measure.curvature.hessian import Hessian
from merit_lab.measure.curvature.spectrum import hutchinson_trace, spectral_density, top_eigenvalues
from merit_lab.models import PRESETS, build
from merit_lab.train.snapshot import mean_loss

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["tiny", "llama-tiny"])
def pair(request):
    """The Hessian of one model on the CPU, and in two micro-batches of unequal size on the GPU.

    One layer: each product launches a thousand kernels, and on a busy GPU every launch waits.
    """
    torch.manual_seed(0)
    model = build(dataclasses.replace(PRESETS[request.param], layers=1, attention="math"))
    sequences = torch.randint(256, (5, 65))
    on_cpu = Hessian(mean_loss(model, sequences, 5), model.parameters())
    copy = build(model.config).to("cuda")
    copy.load_state_dict(model.state_dict())
    return on_cpu, Hessian(mean_loss(copy, sequences, 3), copy.parameters())


def test_products(pair):
    on_cpu, on_gpu = pair
    vector = torch.randn(on_cpu.size)
    expected = on_cpu @ vector
    product = on_gpu @ vector.cuda()
    assert product.device.type == "cuda"
    assert (product.cpu() - expected).norm() < 1e-4 * expected.norm()


def test_eigenvalues_trace_and_density(pair):
    """The same few products on both, of which each method makes the same numbers, converged or not."""
    cpu, gpu = (
        (top_eigenvalues(h, 1, tolerance=0.1), hutchinson_trace(h, 2), spectral_density(h, 1, steps=4))
        for h in pair
    )
    assert all(h.num_products < 40 for h in pair), "the test is meant to be quick"
    np.testing.assert_allclose(gpu[0]["values"], cpu[0]["values"], rtol=1e-3)
    np.testing.assert_allclose(
        gpu[1]["samples"], cpu[1]["samples"], rtol=1e-3, atol=1e-3 * cpu[0]["values"][0]
    )
    mean_squares = [np.dot(np.square(seen["nodes"][0]), seen["weights"][0]) for *_, seen in (gpu, cpu)]
    np.testing.assert_allclose(*mean_squares, rtol=1e-3)
