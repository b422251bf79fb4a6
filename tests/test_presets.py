"""The numbers of the prompt learners' official presets, from the rules that their references state."""

from __future__ import annotations

import pytest

from vbm_ptm.config.run_config import RunConfig, compose
from vbm_ptm.config.tree import find_config, read_yaml
from vbm_ptm.learners import list_learners


def config_of(learner: str, dataset: str, preset: str = "official") -> RunConfig:
    return compose(dataset=dataset, learner=learner, preset=preset).validate()


@pytest.mark.parametrize(
    ("learner", "dataset", "base_rate", "batch_size", "epochs"),
    [
        ("l2p", "cifar100", 0.03, 16, 5),
        ("dualprompt", "cifar100", 0.03, 24, 5),
        ("dualprompt", "imagenet_r", 0.005, 24, 50),
        ("s_prompt_pp", "cifar100", 0.03, 24, 5),
        ("s_prompt_pp", "imagenet_r", 0.005, 24, 50),
    ],
)
def test_presets__rates_of_the_ports_are_scaled_once_and_for_all(
    learner: str, dataset: str, base_rate: float, batch_size: int, epochs: int
) -> None:
    chosen = config_of(learner, dataset).optimization
    assert (chosen.batch_size, chosen.epochs, chosen.optimizer) == (batch_size, epochs, "adam")
    assert chosen.learning_rate == pytest.approx(base_rate * batch_size / 256, rel=1e-12)
    assert (chosen.schedule, chosen.weight_decay, chosen.clip_gradient_norm) == ("constant", 0, 1)


@pytest.mark.parametrize(("dataset", "epochs"), [("cifar100", 20), ("imagenet_r", 50)])
def test_presets__coda_prompt_and_s_iprompt(dataset: str, epochs: int) -> None:
    coda, session = (config_of(learner, dataset).optimization for learner in ("coda_prompt", "s_iprompt"))
    assert (coda.epochs, coda.batch_size, coda.optimizer) == (epochs, 128, "adam")
    assert (coda.learning_rate, coda.schedule, coda.clip_gradient_norm) == (1e-3, "quarter_cosine", None)
    assert (session.epochs, session.batch_size, session.optimizer) == (epochs, 128, "sgd")
    assert (session.learning_rate, session.schedule, session.weight_decay) == (0.01, "cosine", 5e-4)


@pytest.mark.parametrize(
    ("learner", "weights", "normalization"),
    [
        ("l2p", "orig_in21k", "none"),
        ("dualprompt", "orig_in21k", "none"),
        ("s_prompt_pp", "orig_in21k", "none"),
        ("coda_prompt", "augreg_in21k_ft_in1k", "none"),
        ("s_iprompt", "augreg_in21k_ft_in1k", "imagenet"),
        ("linear_probe", "augreg_in21k", "weights"),
    ],
)
def test_presets__weights_and_inputs_of_the_references(
    learner: str, weights: str, normalization: str
) -> None:
    for dataset in ("cifar100", "imagenet_r"):
        official, paper = config_of(learner, dataset), config_of(learner, dataset, "paper")
        assert official.backbone.name == f"vit_base_patch16_224.{weights}"
        assert official.dataset.transforms.normalization == normalization
        assert paper.view_batch.num_views == 1
        same = {"backbone", "learner", "optimization"}
        assert paper.model_dump(include=same) == official.model_dump(include=same)


def test_presets__what_differs_between_data_sets() -> None:
    assert config_of("dualprompt", "cifar100").learner.expert_length == 5
    assert config_of("dualprompt", "imagenet_r").learner.expert_length == 20
    for learner in ("l2p", "dualprompt", "s_prompt_pp"):
        for dataset, smallest in (("cifar100", 0.05), ("imagenet_r", 0.05), ("digits", 0.6)):
            assert config_of(learner, dataset).dataset.transforms.crop_scale == (smallest, 1.0)
    sizes = [
        config_of("coda_prompt", name).dataset.transforms.test_resize for name in ("cifar100", "imagenet_r")
    ]
    assert [round(224 * size) for size in sizes if size] == [224, 256]


def test_presets__paper_takes_one_policy_for_all_data_sets() -> None:
    """Learners that the paper does not report have no such preset."""
    reported = [
        learner
        for learner in list_learners()
        if "paper" in read_yaml(find_config(f"learners/{learner}"))["presets"]
    ]
    assert len(reported) >= 9
    for learner in reported:
        policies = {
            config_of(learner, dataset, "paper").dataset.transforms.strong
            for dataset in ("cifar100", "imagenet_r")
        }
        assert policies == {"autoaugment_cifar10"}, learner


def test_presets__slca_jitters_the_brightness_of_cifar100_alone() -> None:
    for preset in ("official", "paper"):
        assert config_of("slca", "cifar100", preset).dataset.transforms.brightness == pytest.approx(
            63 / 255, abs=1e-6
        )
        assert config_of("slca", "imagenet_r", preset).dataset.transforms.brightness == 0


@pytest.mark.parametrize(
    ("dataset", "epochs", "milestone"), [("cifar100", 20, 18), ("imagenet_r", 50, 40), ("domainnet", 20, 15)]
)
def test_presets__slca_as_the_appendix_of_the_paper_has_it(dataset: str, epochs: int, milestone: int) -> None:
    """Table "Hyper-parameters for ViT-B/16 backbone"."""
    config = config_of("slca", dataset, "paper")
    chosen = config.optimization
    assert (chosen.epochs, chosen.batch_size, chosen.optimizer) == (epochs, 128, "sgd")
    assert (chosen.learning_rate, chosen.weight_decay) == (0.01, 5e-4)
    assert (chosen.schedule, chosen.milestones, chosen.decay) == ("multistep", (milestone,), 0.1)
    assert config.backbone.name == "vit_base_patch16_224.augreg_in21k"
    assert epochs % config.view_batch.num_views == (2 if dataset == "imagenet_r" else 0)
