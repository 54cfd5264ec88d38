import pytest
import torch

from rl_vlm.shared_prefix import RowLayout, shared_attention, shared_row

F, T = False, True


@pytest.fixture
def layout():
    """Row: prefixes aaa bb, completions AA A of the first and B of the second."""
    return RowLayout.build(prefix_lengths=[3, 2], completion_lengths=[2, 1, 1], prompt_of_completion=[0, 0, 1])


def test_the_example_of_the_docstring(layout):
    assert layout.prefix_index.tolist() == [[0, 1, 2], [3, 4, 0]]
    assert layout.query_index.tolist() == [[5, 6], [7, 0], [8, 0]]
    assert layout.key_index.tolist() == [[0, 1, 2, 5, 6], [0, 1, 2, 7, 0], [3, 4, 0, 8, 0]]
    assert layout.predictor_index.tolist() == [2, 5, 6, 2, 7, 4, 8]


def test_a_completion_sees_its_prefix_and_its_own_past(layout):
    assert layout.key_mask[:, 0].tolist() == [
        # prefix   itself
        [[T, T, T, T, F], [T, T, T, T, T]],
        [[T, T, T, T, F], [T, T, T, T, T]],  # the second query is padding
        [[T, T, F, T, F], [T, T, F, T, T]],
    ]


def test_outputs_of_both_attentions_come_back_in_the_order_of_the_row(layout):
    # places: prefixes 0 1 2 | 3 4 (5 padding), then completions 6 7 | 8 (9) | 10 (11)
    assert layout.output_index.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 10]


def test_completions_of_one_token_need_no_place_in_the_row():
    layout = RowLayout.build([3, 2], [0, 0, 0], [0, 1, 1])
    assert layout.query_index.shape == (3, 0)
    assert layout.predictor_index.tolist() == [2, 4, 4]
    row = torch.randn(2, 5, 4)
    assert shared_attention(row, row, row, layout, scale=0.5).shape == (5, 2, 4)


def test_attention_is_that_of_the_whole_row_under_a_mask(layout):
    query, key, value = torch.randn(4, 9, 8), torch.randn(2, 9, 8), torch.randn(2, 9, 8)  # two query heads a key head
    owner = torch.tensor([0, 0, 0, 1, 1, 0, 0, 0, 1])
    part = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 3])  # 0 is a prefix
    sees = (owner[:, None] == owner) & ((part == 0) | (part[:, None] == part)).tril()
    logits = query @ key.repeat_interleave(2, dim=0).mT * 0.3
    expected = logits.masked_fill(~sees, -torch.inf).softmax(-1) @ value.repeat_interleave(2, dim=0)
    ours = shared_attention(query, key, value, layout, scale=0.3)
    torch.testing.assert_close(ours.transpose(0, 1), expected, rtol=1e-5, atol=1e-6)


def test_a_layout_is_active_only_inside(layout):
    from rl_vlm.shared_prefix import _active_layout

    with pytest.raises(ZeroDivisionError), shared_row(layout):
        assert _active_layout.get() is layout
        with shared_row(None):
            assert _active_layout.get() is None
        assert _active_layout.get() is layout
        raise ZeroDivisionError
    assert _active_layout.get() is None
