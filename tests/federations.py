"""The small federations of `equipoise.testing`, under the name that the tests know them by."""

from equipoise.testing.federations import (
    SIZES,
    dropout_cnn,
    federation,
    image_federation,
    linear,
    linear5,
    norm_cnn,
)

__all__ = ["SIZES", "dropout_cnn", "federation", "image_federation", "linear", "linear5", "norm_cnn"]
