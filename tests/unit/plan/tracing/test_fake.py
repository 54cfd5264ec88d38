"""Integers keep their values on fake tensors; floats have only shapes."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from rl_vlm.plan.tracing.fake import fake_tensors, make_fake


def test_values_can_be_read():
    with fake_tensors():
        numbers = torch.arange(2, 8).view(2, 3)
        assert isinstance(numbers, FakeTensor)
        assert numbers.tolist() == [[2, 3, 4], [5, 6, 7]]
        assert numbers[1, 2].item() == 7
        assert bool((numbers > 1).all())
        assert numbers.sum().item() == 27
        assert torch.equal(numbers, torch.tensor([[2, 3, 4], [5, 6, 7]]))
        assert not torch.equal(numbers, numbers + 1)


def test_shapes_that_depend_on_values():
    with fake_tensors():
        mask = torch.tensor([True, False, True, True])
        features = torch.empty(4, 5)
        assert mask.nonzero().tolist() == [[0], [2], [3]]
        assert features[mask].shape == (3, 5)
        assert features[torch.tensor([3, 0])].shape == (2, 5)
        assert torch.arange(4)[mask].tolist() == [0, 2, 3]
        assert torch.repeat_interleave(torch.tensor([7, 8]), torch.tensor([2, 1])).tolist() == [7, 7, 8]
        assert features.masked_scatter(mask[:, None], torch.empty(3, 5)).shape == (4, 5)
        assert [part.shape[0] for part in features.split(torch.tensor([1, 3]).tolist())] == [1, 3]


def test_operators_in_place_change_values_through_views():
    with fake_tensors():
        numbers = torch.zeros(6, dtype=torch.long)
        view = numbers.view(2, 3)
        view[0] += 4
        view[1, 1:] = 9
        assert numbers.tolist() == [4, 4, 4, 0, 9, 9]
        numbers[torch.tensor([True] + 5 * [False])] = 1
        numbers.scatter_(0, torch.tensor([3]), 5)
        assert view.tolist() == [[1, 4, 4], [5, 9, 9]]
        assert torch.zeros(3, dtype=torch.long).scatter(0, torch.tensor([2]), torch.tensor([6])).tolist() == [0, 0, 6]


def test_a_mask_of_floats_is_true_everywhere():
    with fake_tensors():
        scores = torch.empty(3, 2)
        assert scores[scores > 0.5].shape == (6,)


def test_floats_have_no_values():
    with fake_tensors():
        assert torch.arange(3).float().sum().item() == 1.0  # finite, and not 0
        assert torch.empty(2, 3).softmax(-1).isfinite().shape == (2, 3)


def test_real_tensors_outside_become_fake_and_keep_integers():
    token_ids, pixels = torch.tensor([5, 6]), torch.randn(2, 3)
    with fake_tensors() as live:
        assert (token_ids + 1).tolist() == [6, 7]
        assert isinstance(pixels * 2, FakeTensor)
        assert live.now == 0  # both results are freed, and the real tensors do not count


def test_modules_become_fake_and_keep_ties_and_integers():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)).to("meta")
    model[1].weight = model[0].weight
    frozen = nn.Linear(2, 2).requires_grad_(False)
    frozen.register_buffer("places", torch.tensor([3, 1]))
    with fake_tensors() as live:
        make_fake(model, frozen)
        assert model[0].weight is model[1].weight
        assert model[0].weight.device == torch.device("cpu")
        assert isinstance(model[0].weight, nn.Parameter)
        assert not any(parameter.requires_grad for parameter in frozen.parameters())
        places = frozen.places
        assert isinstance(places, Tensor)
        assert places.tolist() == [3, 1]
        weights = 4 * (16 + 4 * 4) + 8  # a tied matrix, four vectors of the norm, its int64 counter
        assert live.now == weights + 4 * (4 + 2) + 2 * 8


def test_an_operator_that_fails_on_values_fails():
    with fake_tensors(), pytest.raises(RuntimeError):
        torch.add(torch.arange(3), torch.arange(2))


def test_products_of_experts_in_float32():
    with fake_tensors():
        rows, matrices = torch.empty(5, 16, requires_grad=True), torch.empty(3, 16, 8, requires_grad=True)
        offsets = torch.tensor([1, 3, 5], dtype=torch.int32)
        made = torch.nn.functional.grouped_mm(rows, matrices, offs=offsets)
        assert made.shape == (5, 8)
        made.sum().backward()
        for tensor in (rows, matrices):
            assert tensor.grad is not None
            assert tensor.grad.shape == tensor.shape
