"""A network of any kind as a backbone: all it has to provide is one vector per image.

Shapes: N images, D width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vbm_ptm.backbones.batch_norm import with_global_batch_norm
from vbm_ptm.backbones.compiling import compiled
from vbm_ptm.backbones.support import Backbone, Preprocessing, WeightsRecord
from vbm_ptm.errors import UsageError


class FeatureNetwork(Backbone):
    """A ``ResNet18``, or a timm model without its classifier; state-dict keys begin with ``network.``.

    Args:
        network: Images (N,3,H,W) -> features (N,D); its batch norms are replaced by ones over all ranks.
        width: D.
        preprocessing: How images must be prepared.
        weights: Where the weights come from; None if the caller made them.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        width: int,
        preprocessing: Preprocessing,
        weights: WeightsRecord | None = None,
    ) -> None:
        super().__init__()
        self.network = with_global_batch_norm(network)
        self.width = width
        self.preprocessing = preprocessing
        self.weights = weights

    def features(self, images: Tensor) -> Tensor:
        """Return one vector per image (N,D)."""
        forward = _forward if self.compile_backend is None else compiled(_forward, self.compile_backend)
        vectors: Tensor = forward(self.network, images)
        return vectors

    def feature_map(self, images: Tensor) -> Tensor:
        """Return the last feature map (N,D,h,w)."""
        network: Any = self.network
        values: Tensor = network.forward_features(images)
        if values.ndim == 4 and values.shape[3] == self.width != values.shape[1]:
            values = values.permute(0, 3, 1, 2)
        if values.ndim != 4 or values.shape[1] != self.width:
            raise UsageError(
                f"this backbone turns an image into {tuple(values.shape[1:])} before its features; needed: a map of "
                f"{self.width} channels, as ResNets have."
            )
        return values


def _forward(network: nn.Module, images: Tensor) -> Any:
    return network(images)
