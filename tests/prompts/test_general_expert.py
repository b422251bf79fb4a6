"""DualPrompt's prefixes against golden numbers and hand values.

Shapes: N images (8), D width (48), B blocks, L tokens of a prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.prompts.general_expert import ExpertPrefixes, GeneralPrefixes
from vbm_ptm.randomness import seeded

Golden = Callable[[str], dict[str, Tensor]]
ClassToken = Callable[[Mapping[int, Tensor]], Tensor]


def experts_of(
    num_tasks: int, *, blocks: tuple[int, ...] = (2, 4), copy_previous: bool = False
) -> ExpertPrefixes:
    with seeded(0):
        experts = ExpertPrefixes(blocks, 3, 5)
        for _ in range(num_tasks):
            experts.append(copy_previous=copy_previous)
    return experts


def test_prefixes__equal_the_reference(
    golden: Golden, backbone: PromptableViT, images: Tensor, class_token: ClassToken
) -> None:
    """The CODA repository's DualPrompt: a key table of its own for each block, and a summed loss."""
    expected = golden("dual_codarepo_task1")
    query = backbone.query(images)
    general = GeneralPrefixes((0, 1), 3, 48)
    tables = {block: ExpertPrefixes((block,), 4, 48) for block in (2, 3, 4)}
    with torch.no_grad():
        for row, block in enumerate(general.blocks):
            general.prefixes[row].copy_(expected[f"param.g_p_{block}"].unflatten(0, (2, 3)))
        for block, experts in tables.items():
            for task in range(5):
                experts.append(copy_previous=False)
                experts.prefixes[task][0].copy_(expected[f"param.e_p_{block}"][task].unflatten(0, (2, 4)))
                experts.keys[task].copy_(expected[f"param.e_k_{block}"][task])

    prefixes, loss = general(), torch.zeros(())
    for experts in tables.values():
        experts.requires_grad_(True)
        prefixes |= experts.of_task(1)
        loss = loss + (1 - experts.similarity(query)[:, 1]).sum()
    output = class_token(prefixes)
    torch.testing.assert_close(output, expected["train.cls"], atol=1e-8, rtol=0)
    torch.testing.assert_close(loss, expected["train.prompt_loss"][0], atol=1e-8, rtol=0)
    (output.square().sum() + loss).backward()
    for row, block in enumerate(general.blocks):
        gradient = general.prefixes.grad[row].flatten(0, 1)
        torch.testing.assert_close(gradient, expected[f"grad.g_p_{block}"], atol=1e-6, rtol=0)
    for block, experts in tables.items():
        gradient = experts.prefixes[1].grad[0].flatten(0, 1)
        torch.testing.assert_close(gradient, expected[f"grad.e_p_{block}"][1], atol=1e-6, rtol=0)
        torch.testing.assert_close(experts.keys[1].grad, expected[f"grad.e_k_{block}"][1], atol=1e-6, rtol=0)
        for task in (0, 2, 3, 4):
            assert experts.prefixes[task].grad is None
            assert not experts.keys[task].grad.any()

    prefixes = general()
    for experts in tables.values():
        prefixes |= experts.of_images(experts.similarity(query).argmax(dim=1))
    torch.testing.assert_close(class_token(prefixes), expected["eval.cls"], atol=1e-8, rtol=0)


def test_experts__belong_to_the_images_that_chose_them() -> None:
    """Keys hold the task number, values 100 more; a reshape in place of a permutation would mix them."""
    experts = experts_of(3)
    with torch.no_grad():
        for task, prefix in enumerate(experts.prefixes):
            prefix[:, 0], prefix[:, 1] = task, 100 + task
            prefix[1] += 1000  # the second block
    chosen = experts.of_images(torch.tensor([0, 1, 2, 0]))
    assert list(chosen) == [2, 4]
    for block, offset in ((2, 0), (4, 1000)):
        assert chosen[block].shape == (4, 2, 3, 5)
        assert bool((chosen[block] == chosen[block][:, :, :1, :1]).all())
        pairs = chosen[block][:, :, 0, 0] - offset
        assert pairs.tolist() == [[0, 100], [1, 101], [2, 102], [0, 100]]
    for task in range(3):
        own = experts.of_task(task)
        assert {block: prefix.shape for block, prefix in own.items()} == {2: (1, 2, 3, 5), 4: (1, 2, 3, 5)}
        assert [prefix[0, 1, 0, 0].item() for prefix in own.values()] == [100 + task, 1100 + task]


def test_experts__similarity_is_the_cosine_with_each_key() -> None:
    experts = ExpertPrefixes((0,), 1, 2)
    for _ in range(3):
        experts.append(copy_previous=False)
    with torch.no_grad():
        for key, value in zip(experts.keys, ([2.0, 0.0], [0.0, 0.5], [-3.0, -3.0]), strict=True):
            key.copy_(torch.tensor(value))
    similarity = experts.similarity(torch.tensor([[3.0, 4.0], [0.1, 0.0]]))
    half = 0.5**0.5
    expected = torch.tensor([[0.6, 0.8, -1.4 * half], [1.0, 0.0, -half]])
    torch.testing.assert_close(similarity, expected, atol=1e-12, rtol=0)
    experts.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = experts.similarity(torch.tensor([[3.0, 4.0]], dtype=torch.float32))
    torch.testing.assert_close(rounded, expected[:1].float(), atol=1e-6, rtol=0)


def test_experts__start_from_the_previous_prefix_but_from_a_key_of_their_own() -> None:
    copied, fresh = experts_of(3, copy_previous=True), experts_of(3)
    assert torch.equal(copied.prefixes[2], copied.prefixes[1])
    assert copied.prefixes[2].data_ptr() != copied.prefixes[1].data_ptr()
    assert not torch.equal(fresh.prefixes[2], fresh.prefixes[1])
    for experts in (copied, fresh):
        assert not torch.equal(experts.keys[2], experts.keys[1])


def test_experts__only_the_newest_is_trained() -> None:
    experts = experts_of(3)
    for parameters in (experts.prefixes, experts.keys):
        assert [parameter.requires_grad for parameter in parameters] == [False, False, True]


def test_prefixes__are_drawn_from_the_whole_interval() -> None:
    with seeded(0):
        general, experts = GeneralPrefixes((0, 1), 20, 48), ExpertPrefixes((2, 3), 20, 480)
        experts.append(copy_previous=True)
    assert {block: prefix.shape for block, prefix in general().items()} == {
        0: (1, 2, 20, 48),
        1: (1, 2, 20, 48),
    }
    for parameter in (general.prefixes, experts.prefixes[0], experts.keys[0]):
        assert -1 <= parameter.min() < -0.98
        assert 0.98 < parameter.max() <= 1
        assert abs(parameter.mean()) < 0.07
