"""What torch's transformations make of the attentions that are written by hand."""

import pytest
import torch
from attention_oracle import with_gradients
from test_window import MASKS, SHAPES, make_inputs, make_mask
from torch.testing import assert_close

from transformer.long_range import top_k_attention
from transformer.window import window_attention

ATTENDS = {"window": window_attention(3), "top-k": top_k_attention(3)}
each_attend = pytest.mark.parametrize("attend", ATTENDS.values(), ids=ATTENDS)


@each_attend
@pytest.mark.parametrize("masked", [False, True])
def test_vmap_equals_a_batch(attend, masked):
    q, k, v, upstream = make_inputs(*SHAPES["grouped"])
    more = (make_mask(q, k, "any"),) if masked else ()
    assert_close(torch.vmap(attend)(q, k, v, *more), attend(q, k, v, *more))

    def loss(q, k, v, up, *more):
        return (attend(q, k, v, *more) * up).sum()

    slopes = torch.vmap(torch.func.grad(loss, (0, 1, 2)))(q, k, v, upstream, *more)
    want = with_gradients(lambda *x: attend(*x, *more), [q, k, v], upstream)[1:]
    assert_close(list(slopes), want)
    over_q = torch.vmap(attend, in_dims=(0, None, None))
    assert_close(over_q(q, k[0], v[0]), attend(q, k[0], v[0]))


@each_attend
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", SHAPES)
def test_meta_device_gives_the_shape(attend, shape, kind):
    q, k, v, _ = make_inputs(*SHAPES[shape])
    mask = make_mask(q, k, kind)
    want = attend(q, k, v, mask)
    mask = mask if mask is None else mask.to("meta")
    got = attend(*(x.to("meta") for x in (q, k, v)), mask)
    assert got.device.type == "meta" and got.shape == want.shape
