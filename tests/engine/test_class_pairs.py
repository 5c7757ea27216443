"""Classes are numbered alike on a CPU and on an accelerator, which is not asked how many there are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from contrastive_zoo.engine.anchor_block import class_numbers, class_numbers_as_floats, only_positives
from contrastive_zoo.ranks import devices

IDS = st.lists(st.sampled_from([-(2**63), -1, 0, 1, 2**60, 2**60 + 1, 2**63 - 1]), max_size=12)


@given(ids=IDS)
def test_an_accelerator_numbers_classes_as_a_cpu(ids: list[int]) -> None:
    x = torch.tensor(ids, dtype=torch.int64)
    classes, counts = class_numbers(x)
    partners = only_positives(classes, counts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "on_cpu", lambda x: False)
        found, found_counts = class_numbers(x)
        found_partners = only_positives(found, found_counts)
    assert torch.equal(found, classes)
    assert found_counts.tolist() == counts.tolist() + [0] * (len(ids) - len(counts))
    assert found_partners is not None
    assert torch.equal(found_partners, torch.arange(len(ids)) if partners is None else partners)
    assert class_numbers_as_floats(x).tolist() == classes.tolist()
