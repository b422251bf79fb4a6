"""CODA-Prompt's components against golden numbers and hand values.

Shapes: N images (8), D width (48), M components, L tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.prompts.decomposed import DecomposedPrompt, orthonormal_rows
from vbm_ptm.randomness import seeded

Golden = Callable[[str], dict[str, Tensor]]
PER_TASK = 4


def prompt_of(length: int, width: int, *counts: int) -> DecomposedPrompt:
    prompt = DecomposedPrompt(length, width)
    for count in counts:
        prompt.append(count)
    return prompt


def parameters_of(prompt: DecomposedPrompt) -> dict[str, nn.ParameterList]:
    return {"p": prompt.components, "k": prompt.keys, "a": prompt.attentions}


@pytest.mark.parametrize("task", [0, 2])
def test_prompt__equals_the_reference(
    golden: Golden,
    backbone: PromptableViT,
    images: Tensor,
    class_token: Callable[[Mapping[int, Tensor]], Tensor],
    task: int,
) -> None:
    expected = golden(f"coda_task{task}")
    assert expected["task"].item() == task
    query = backbone.query(images)
    prompts = {block: prompt_of(8, 48, *[PER_TASK] * (task + 1)) for block in range(5)}
    rows = [slice(number * PER_TASK, (number + 1) * PER_TASK) for number in range(task + 1)]
    with torch.no_grad():
        for block, prompt in prompts.items():
            for kind, parameters in parameters_of(prompt).items():
                for parameter, own in zip(parameters, rows, strict=True):
                    parameter.copy_(expected[f"param.e_{kind}_{block}"][own])

    output = class_token({block: prompt.prefix(query) for block, prompt in prompts.items()})
    penalty = torch.stack([prompt.orthogonality_penalty() for prompt in prompts.values()]).sum()
    loss = expected["ortho_mu"][0] * penalty
    torch.testing.assert_close(output, expected["train.cls"], atol=1e-8, rtol=0)
    torch.testing.assert_close(output, expected["eval.cls"], atol=1e-8, rtol=0)
    torch.testing.assert_close(loss, expected["train.prompt_loss"][0], atol=1e-8, rtol=0)
    (output.square().sum() + loss).backward()
    for block, prompt in prompts.items():
        for kind, parameters in parameters_of(prompt).items():
            gradient = expected[f"grad.e_{kind}_{block}"]
            torch.testing.assert_close(parameters[task].grad, gradient[rows[task]], atol=1e-6, rtol=0)
            assert all(parameter.grad is None for parameter in parameters[:task])
            assert not gradient[: task * PER_TASK].any()  # so the reference detaches them


def test_prompt__weights_and_prefix_follow_the_formula() -> None:
    prompt = prompt_of(2, 2, 1, 1)
    with torch.no_grad():
        for parameter, value in zip(prompt.attentions, ([1.0, 1.0], [1.0, 0.0]), strict=True):
            parameter.copy_(torch.tensor([value]))
        for parameter, value in zip(prompt.keys, ([1.0, 0.0], [1.0, 1.0]), strict=True):
            parameter.copy_(torch.tensor([value]))
        prompt.components[0].copy_(torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]))
        prompt.components[1].copy_(torch.tensor([[[0.0, 1.0], [3.0, 0.0]]]))
    query = torch.tensor([[1.0, 2.0]])
    first, second = 0.2**0.5, 0.5**0.5
    torch.testing.assert_close(prompt.weights(query), torch.tensor([[first, second]]), atol=1e-12, rtol=0)
    assert [round(weight, 6) for weight in prompt.weights(query)[0].tolist()] == [0.447214, 0.707107]
    expected = torch.tensor([[[[first, second]], [[3 * second, 2 * first]]]])  # keys, then values
    torch.testing.assert_close(prompt.prefix(query), expected, atol=1e-12, rtol=0)


def test_prompt__penalty_is_the_mean_over_all_pairs() -> None:
    prompt = prompt_of(2, 2, 1, 1)
    with torch.no_grad():
        for parameters in (prompt.keys, prompt.attentions):
            parameters[0].copy_(torch.tensor([[1.0, 0.0]]))
            parameters[1].copy_(torch.tensor([[0.0, 1.0]]))
        prompt.components[0].copy_(torch.tensor([[[1.0, 0.0], [0.0, 0.0]]]))
        prompt.components[1].copy_(torch.tensor([[[0.0, 0.0], [0.0, 1.0]]]))
    assert prompt.orthogonality_penalty().item() == 0
    with torch.no_grad():
        prompt.keys[0].copy_(torch.tensor([[1.0, 1.0]]))  # [[1, 1], [0, 1]]
    assert prompt.orthogonality_penalty().item() == pytest.approx(0.75)
    with torch.no_grad():
        prompt.components[1][0, 0, 0] = 1.0  # one more such pair of rows, flattened
    assert prompt.orthogonality_penalty().item() == pytest.approx(1.5)


def test_prompt__grows_by_orthonormal_rows_and_keeps_the_old_ones() -> None:
    with seeded(0):
        prompt = prompt_of(4, 12, 3)
        with torch.no_grad():  # trained rows are neither orthogonal nor of unit length
            for parameters in parameters_of(prompt).values():
                parameters[0].copy_(torch.randn_like(parameters[0]) + 1)
        before = {name: tensor.clone() for name, tensor in prompt.state_dict().items()}
        prompt.append(3)
        prompt.append(2)
    for name, tensor in before.items():
        assert torch.equal(prompt.state_dict()[name], tensor)
    for kind, parameters in parameters_of(prompt).items():
        assert [len(parameter) for parameter in parameters] == [3, 3, 2]
        assert [parameter.requires_grad for parameter in parameters] == [False, False, True]
        assert all(parameter.shape[1:] == ((4, 12) if kind == "p" else (12,)) for parameter in parameters)
        old, *new = [parameter.detach().flatten(1) for parameter in parameters]
        rows = torch.cat(new)
        torch.testing.assert_close(rows @ rows.T, torch.eye(5), atol=1e-12, rtol=0)
        assert (rows @ old.T).abs().max() < 1e-12


def test_prompt__stays_within_rounding_in_single_precision() -> None:
    torch.set_default_dtype(torch.float32)
    with seeded(0):
        prompt = prompt_of(8, 48, *[PER_TASK] * 10)
    for parameters in parameters_of(prompt).values():
        rows = torch.cat([parameter.detach().flatten(1) for parameter in parameters])
        assert rows.dtype == torch.float32
        assert (rows @ rows.T - torch.eye(40)).abs().max() < 1e-5


def test_orthonormal_rows__are_those_of_gram_schmidt() -> None:
    others = torch.tensor(
        [[1.0, 1.0, 0.0, 0.0, 0.0], [1.0, 0.5, 0.0, 0.0, 0.0]]
    )  # they span the first two axes
    with seeded(3):
        rows = orthonormal_rows(2, 5, others)
    with seeded(3):
        first, second = torch.randn(5, 2, dtype=torch.float64).T
    for row in (first, second):
        row[:2] = 0
    first = first / first.square().sum().sqrt()
    second = second - (second * first).sum() * first
    torch.testing.assert_close(
        rows, torch.stack([first, second / second.square().sum().sqrt()]), atol=1e-12, rtol=0
    )


def test_orthonormal_rows__end_where_the_dimensions_do() -> None:
    first = orthonormal_rows(3, 5, None)
    last = orthonormal_rows(2, 5, first)
    rows = torch.cat([first, last])
    torch.testing.assert_close(rows @ rows.T, torch.eye(5), atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match=r"5 \+ 1 rows cannot be independent in 5 dimensions"):
        orthonormal_rows(1, 5, rows)


def test_orthogonality_penalty__is_not_rounded_by_autocast() -> None:
    prompt = prompt_of(4, 48, 10).float()
    expected = prompt.orthogonality_penalty()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(prompt.orthogonality_penalty(), expected)
