"""The library's algorithms that the table names for this card: right for all rows that they serve; torch where there are none."""

import pytest
import torch

from hexad.operators.args import LinearArgs
from hexad.operators.fused import FusedLinearArgs

pytest.importorskip("triton")
from hexad.operators.triton import blaslt
from hexad.operators.triton.linear import bind_linear, bind_linear_add

if not torch.cuda.is_available():
    pytest.skip("needs a card", allow_module_level=True)

CARD = blaslt.table().get(torch.cuda.get_device_name(), {"products": {}})
PRODUCTS = [(key, rows) for key, entries in CARD["products"].items() for rows in entries]


def tensors(key: str, rows: int):
    out_features, in_features = map(int, key.split(",")[:2])
    wide = torch.randn(rows, in_features + 64).bfloat16().cuda()
    weight = (torch.randn(out_features, in_features) * in_features**-0.5).bfloat16().cuda()
    return wide[:, :in_features], weight, torch.randn(rows, out_features).bfloat16().cuda()


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((got.float() - expected).norm() / expected.norm()) < 0.004 and bool(got.isfinite().all())


@pytest.mark.parametrize(("key", "measured"), PRODUCTS)
def test_named_algorithms(key, measured):
    entries = CARD["products"][key]
    (rows, names), *_ = blaslt.spans({measured: entries[measured]})
    library = blaslt.on_device(torch.cuda.current_device())
    assert library.version == CARD["version"], "the table is of another version of the library"
    add = key.endswith(",add")
    for count in {rows[0], int(measured) - 5, int(measured)}:
        x, weight, residual = tensors(key, count)
        product = x.float() @ weight.float().t()
        out = residual.clone() if add else torch.empty_like(residual)
        assert library.multiply(library.algorithm(names), x, weight, out, add=add), "the algorithm does not serve these rows"
        assert close(out, product + residual.float() if add else product)


@pytest.mark.parametrize("key", CARD["products"])
def test_operators_take_them(key, monkeypatch):
    """By an operator, eager and in a graph; and by torch where the library is of another version or refuses."""
    out_features, in_features = map(int, key.split(",")[:2])
    rows = min(map(int, CARD["products"][key]))
    add, served = key.endswith(",add"), []
    real = blaslt.BlasLt.multiply

    def watched(self, *args, **options):
        served.append(real(self, *args, **options))
        return served[-1]

    monkeypatch.setattr(blaslt.BlasLt, "multiply", watched)
    x, weight, residual = tensors(key, rows)
    expected = x.float() @ weight.float().t() + (residual.float() if add else 0)

    def operator():
        if add:
            call = bind_linear_add(FusedLinearArgs(in_features, out_features, False, torch.bfloat16, "cuda"))
            return lambda: call(x, residual.clone(), (weight, None))
        call = bind_linear(LinearArgs(in_features, out_features, False, torch.bfloat16, "cuda"))
        return lambda: call(x, (weight, None))

    run = operator()
    assert close(run(), expected) and served == [True]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    out.fill_(float("nan"))
    graph.replay()
    assert close(out, expected) and served == [True, True]
    monkeypatch.setitem(CARD, "version", 1)
    assert close(operator()(), expected) and len(served) == 2
    monkeypatch.undo()
    monkeypatch.setattr(blaslt.BlasLt, "multiply", lambda *args, **options: False)
    assert close(operator()(), expected)
