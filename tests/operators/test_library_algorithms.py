"""The table of the library's algorithms: what it says, which rows it serves, and that nothing but it decides."""

import torch

from hexad.operators.triton import blaslt


def test_the_table_is_whole() -> None:
    for card in blaslt.table().values():
        assert card["version"] > 0
        for key, entries in card["products"].items():
            out_features, in_features, *add = key.split(",")
            assert int(out_features) > 0 and int(in_features) > 0 and add in ([], ["add"])
            assert entries
            for rows, fields in entries.items():
                assert int(rows) >= 64 and len(blaslt.Algorithm(*fields)) == 7 and all(isinstance(field, int) for field in fields)


def test_rows_that_an_algorithm_serves() -> None:
    one, two, three = [1, 0, 0, 0], [2, 0, 0, 0], [3, 0, 0, 0]
    spans = blaslt.spans({"256": one, "512": two, "8192": three})

    def number(rows: int) -> int | None:
        return next((names.number for span, names in spans if rows in span), None)

    found = {rows: number(rows) for rows in (224, 225, 256, 257, 448, 449, 512, 513, 4096, 4097, 8192, 8193, 100_000)}
    nothing = dict.fromkeys((224, 257, 448, 513, 4096))
    assert found == nothing | dict.fromkeys((225, 256), 1) | dict.fromkeys((449, 512), 2) | dict.fromkeys((4097, 8192, 8193, 100_000), 3)
    assert [number for number in (449, 512) if number in blaslt.spans({"512": two})[0][0]] == [449, 512]
    assert 513 not in blaslt.spans({"512": two})[0][0]  # few rows: nothing is known of more


def test_no_entry_and_no_card_leave_it_to_torch(monkeypatch) -> None:
    entry = {"version": 1, "products": {"64,32": {"512": [1, 2, 3, 4]}}}
    monkeypatch.setattr(blaslt, "table", lambda: {"a card": entry})
    assert blaslt.chosen("another card", 64, 32) is None
    assert blaslt.chosen("a card", 64, 64) is None
    assert blaslt.chosen("a card", 64, 32, add=True) is None
    multiply = blaslt.chosen("a card", 64, 32)
    assert multiply is not None
    for device in ("cpu", "meta"):  # as `hexad warm` runs it
        assert multiply(torch.empty((512, 32), dtype=torch.bfloat16, device=device), torch.empty(64, 32, device=device), None) is None
