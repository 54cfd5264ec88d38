from rl_vlm.distributed.collectives import Collectives
from rl_vlm.distributed.ranks import Ranks


def test_ranks_inherit_nothing_of_a_single_rank():
    """A method that is missing would act as if there were one rank."""
    assert {name for name in vars(Collectives) if not name.startswith("_")} <= vars(Ranks).keys()
