"""Schedules against the lists of the methods' papers and repositories, and what optimizers are given."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from vbm_ptm.engine.optimization import OptimizationConfig, build_optimizer
from vbm_ptm.engine.optimizer_state import load_optimizer_tensors, optimizer_tensors
from vbm_ptm.engine.schedule import learning_rate_at, learning_rate_factor, set_learning_rate, summed_rates
from vbm_ptm.learners.base import ParameterGroup


def config_of(**settings: Any) -> OptimizationConfig:
    return OptimizationConfig.model_validate(settings)


def factors(config: OptimizationConfig) -> list[float]:
    return [learning_rate_factor(config, epoch) for epoch in range(config.epochs)]


def groups() -> list[ParameterGroup]:
    return [
        ParameterGroup("backbone", [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))], 0.01),
        ParameterGroup("heads", [nn.Parameter(torch.ones(3))]),
    ]


def test_schedule__of_slca_falls_for_the_last_two_epochs() -> None:
    config = config_of(epochs=20, learning_rate=0.01, schedule="multistep", milestones=["18"], decay="0.1")
    assert factors(config) == pytest.approx([1.0] * 18 + [0.1] * 2)
    optimizer = build_optimizer(config, groups())
    rates = []
    for epoch in range(20):
        set_learning_rate(optimizer, config, epoch)
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates[0] == rates[17] == pytest.approx([1e-4, 1e-2])
    assert rates[18] == rates[19] == pytest.approx([1e-5, 1e-3])
    set_learning_rate(optimizer, config, 0)  # nothing adds up
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-4, 1e-2])


def test_schedule__passes_several_milestones() -> None:
    config = config_of(epochs=6, schedule="multistep", milestones=(2, 5), decay=0.5)
    assert factors(config) == [1, 1, 0.5, 0.5, 0.5, 0.25]


def test_schedule__quarter_cosine_is_that_of_coda_prompt() -> None:
    values = factors(config_of(epochs=20, schedule="quarter_cosine"))
    assert values[0] == 1.0
    assert values[1] == pytest.approx(0.996652, abs=1e-6)
    assert values[-1] == pytest.approx(0.015707, abs=1e-6)
    assert values == pytest.approx([math.cos(99 * math.pi * k / (200 * 19)) for k in range(20)])
    assert factors(config_of(epochs=1, schedule="quarter_cosine")) == [1.0]


def test_schedule__cosine_is_that_of_torch() -> None:
    config = config_of(epochs=5, learning_rate=0.01, schedule="cosine")
    assert factors(config) == pytest.approx([1, 0.9045085, 0.6545085, 0.3454915, 0.0954915], abs=1e-7)


@pytest.mark.parametrize(
    ("schedule", "milestones"),
    [("cosine", ()), ("quarter_cosine", ()), ("multistep", (18,)), ("multistep", (7, 13))],
)
@pytest.mark.parametrize("num_views", [2, 4, 5])
def test_schedule__by_cycle_gives_every_sample_the_same_sum(
    schedule: str, milestones: tuple[int, ...], num_views: int
) -> None:
    """Samples of epoch p of a cycle are trained on in the epochs p, p + V, p + 2 V, ..."""
    by_cycle = config_of(epochs=20, schedule=schedule, milestones=milestones, schedule_unit="cycle")
    rates = [learning_rate_factor(by_cycle, epoch, cycle_length=num_views) for epoch in range(20)]
    sums = [sum(rates[phase::num_views]) for phase in range(num_views)]
    assert max(sums) <= 1.05 * min(sums)
    summed = summed_rates(by_cycle, cycle_length=num_views)
    assert sums == pytest.approx([rate / by_cycle.learning_rate for rate in summed])
    for first in range(0, 20, num_views):
        assert len(set(rates[first : first + num_views])) == 1
    plain = config_of(epochs=20, schedule=schedule, milestones=milestones)
    assert sum(rates) == pytest.approx(sum(factors(plain)))
    assert [learning_rate_factor(by_cycle, epoch) for epoch in range(20)] == factors(plain)
    assert [learning_rate_factor(plain, epoch, cycle_length=4) for epoch in range(20)] == factors(plain)


def test_schedule__by_cycle_ends_within_a_cycle() -> None:
    config = config_of(epochs=6, schedule="multistep", milestones=(5,), schedule_unit="cycle")
    rates = [learning_rate_factor(config, epoch, cycle_length=4) for epoch in range(6)]
    assert rates == pytest.approx([1, 1, 1, 1, 0.55, 0.55])


def test_schedule__constant_stays() -> None:
    assert factors(config_of(epochs=3, milestones=(1,))) == [1.0] * 3  # milestones belong to another schedule


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd", torch.optim.SGD), ("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)]
)
def test_build_optimizer__keeps_the_groups_apart(name: str, kind: type[torch.optim.Optimizer]) -> None:
    config = config_of(optimizer=name, learning_rate=0.2, weight_decay=0.3, momentum=0.4)
    given = groups()
    optimizer = build_optimizer(config, given)
    assert type(optimizer) is kind
    assert [group["name"] for group in optimizer.param_groups] == ["backbone", "heads"]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.002, 0.2])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3]
    for group, one in zip(optimizer.param_groups, given, strict=True):
        assert [id(parameter) for parameter in group["params"]] == [id(p) for p in one.parameters]
    if name == "sgd":
        assert [group["momentum"] for group in optimizer.param_groups] == [0.4, 0.4]
    else:
        assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.999)] * 2


def trained(steps: int, *, resumed_at: int | None = None, **settings: Any) -> list[torch.Tensor]:
    """Three parameters after steps on random gradients; the last has none before the third step."""
    generator = torch.Generator().manual_seed(0)
    model = nn.ParameterList(torch.randn(size, generator=generator) for size in ((37, 5), (3,), (11, 16)))
    config = config_of(learning_rate=0.1, **settings)
    group = [ParameterGroup("all", list(model))]
    optimizer = build_optimizer(config, group)
    for step in range(steps):
        if step == resumed_at:
            kept = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, model).items()}
            optimizer = build_optimizer(config, group)
            load_optimizer_tensors(optimizer, model, kept)
        for number, parameter in enumerate(model):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if number == 2 and step < 2 else gradient
        optimizer.step()
    return [parameter.detach() for parameter in model]


@pytest.mark.parametrize(
    "settings", [{"momentum": 0.0}, {}, {"weight_decay": 5e-4}, {"optimizer": "adam"}, {"optimizer": "adamw"}]
)
def test_build_optimizer__fused_is_the_plain_one_to_rounding(settings: dict[str, Any]) -> None:
    assert not build_optimizer(config_of(**settings), groups()).defaults["fused"]
    assert build_optimizer(config_of(**settings, fused=True), groups()).defaults["fused"]
    for fused, plain in zip(trained(8, **settings, fused=True), trained(8, **settings), strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("resumed_at", [1, 4])
def test_build_optimizer__goes_on_from_what_a_fused_one_kept(name: str, resumed_at: int) -> None:
    whole = trained(6, optimizer=name, fused=True)
    for ours, other in zip(trained(6, optimizer=name, fused=True, resumed_at=resumed_at), whole, strict=True):
        assert torch.equal(ours, other)


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"learning_rate": 0},
        {"learning_rate": "inf"},
        {"momentum": 1},
        {"weight_decay": -1e-4},
        {"schedule": "linear"},
        {"optimizer": "lion"},
        {"clip_gradient_norm": 0},
        {"milestones": ["eighteen"]},
        {"warmup": 3},
    ],
)
def test_optimization_config__refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        config_of(**wrong)


def test_learning_rate__of_the_expandable_schedule() -> None:
    """A warm-up of ten epochs, then milestones at 110 and 130 of 170."""
    config = OptimizationConfig(
        epochs=170, learning_rate=0.1, schedule="multistep", milestones=(110, 130), warmup_epochs=10
    )
    rates = [0.1 * learning_rate_factor(config, epoch) for epoch in range(170)]
    assert rates[:10] == pytest.approx([0.01 * (epoch + 1) for epoch in range(10)])
    assert rates[10:110] == pytest.approx([0.1] * 100)
    assert rates[110:130] == pytest.approx([0.01] * 20)
    assert rates[130:] == pytest.approx([0.001] * 40)


def test_set_learning_rate__ends_at_the_minimum_for_every_group() -> None:
    config = OptimizationConfig(epochs=10, learning_rate=0.1, schedule="cosine", minimum_learning_rate=1e-3)
    groups = [
        ParameterGroup(name, [torch.nn.Parameter(torch.zeros(1))], scale)
        for name, scale in (("a", 1.0), ("b", 0.1))
    ]
    optimizer = build_optimizer(config, groups)
    for epoch in range(10):
        set_learning_rate(optimizer, config, epoch)
        for group, start in zip(optimizer.param_groups, (0.1, 0.01), strict=True):
            expected = 1e-3 + (start - 1e-3) * (1 + math.cos(math.pi * epoch / 10)) / 2
            assert group["lr"] == pytest.approx(expected, rel=1e-12)


def test_learning_rate_at__never_rises_to_the_minimum() -> None:
    config = OptimizationConfig(epochs=4, learning_rate=0.1, schedule="cosine", minimum_learning_rate=1e-3)
    assert {learning_rate_at(config, epoch, scale=1e-3) for epoch in range(4)} == {1e-4}
    assert sum(summed_rates(config, cycle_length=2)) == pytest.approx(
        sum(learning_rate_at(config, epoch) for epoch in range(4))
    )
    with pytest.raises(ValueError, match=r"minimum_learning_rate is 0\.2, above the learning_rate of 0\.1"):
        OptimizationConfig(learning_rate=0.1, minimum_learning_rate=0.2)
