"""Where gradients lie in DistributedDataParallel's buckets, which its hook's arguments say.

first step        of a model: DDP makes other buckets after it
second step       the hook learns each bucket
later steps       the places are offered (`reference.state.gradient_places`); a bucket elsewhere is learned again
"""

import contextlib
import weakref
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from reference.state import gradient_places
from reference.state.gradient_places import Places

Buckets = dict[int, tuple[int, Places]]  # by a bucket's number its address, and the places in it


class BucketPlaces:
    """Those of the models of one `GradientOrder`; they go with their model."""

    def __init__(self) -> None:
        self._of_models: weakref.WeakKeyDictionary[Any, Buckets] = weakref.WeakKeyDictionary()
        self._known: Buckets | None = None  # of the model whose step it is, if that is not the first

    def begin(self, model: DistributedDataParallel | None) -> None:
        """A step begins. Without `gradient_as_bucket_view` DDP accepts no gradient in its buckets."""
        self._known = self._of_models.get(model) if model is not None and model.gradient_as_bucket_view else None

    def end(self, model: DistributedDataParallel | None) -> None:
        """A step has ended, `model` is None where by an error."""
        self._known = None
        if model is not None:
            self._of_models.setdefault(model, {})

    def offered(self) -> contextlib.AbstractContextManager[None]:
        """In the block backward finds the places."""
        known = (self._known or {}).values()
        return gradient_places.offering({p: place for _, places in known for p, place in places.items()})

    def learn(self, bucket: dist.GradBucket) -> None:
        """Note where the bucket's gradients lie, unless that is known."""
        if self._known is None:
            return
        address, number = bucket.buffer().data_ptr(), bucket.index()
        if self._known.get(number, (0, {}))[0] != address:
            views = zip(bucket.parameters(), bucket.gradients(), strict=True)
            places = {p: gradient_places.place_of(p, view) for p, view in views}
            self._known[number] = address, {p: place for p, place in places.items() if place is not None}
