import torch

from rl_vlm.types import pad_split


def test_rows_are_split_and_padded():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    padded = pad_split(values, [1, 0, 3])
    assert padded.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [2.0, 3.0, 4.0]]
    (padded * torch.tensor([[1.0], [9.0], [10.0]])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 10.0, 10.0, 10.0]


def num_nodes(output: torch.Tensor) -> int:
    """Operators of the graph that made a tensor."""
    found, nodes = set(), [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in found:
            found.add(node)
            nodes += [following for following, _ in node.next_functions]
    return len(found)


def test_more_rows_make_no_larger_graph():
    sizes = {num_nodes(pad_split(torch.zeros(rows * 2, requires_grad=True), [2] * rows)) for rows in (1, 3, 50)}
    assert len(sizes) == 1
