"""Embedding tables of models, without processes."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import steadfast
from steadfast.tables import as_ids, ids_of

torch = pytest.importorskip("torch")
st = pytest.importorskip("steadfast.torch")

KEY = SimpleNamespace(seed=5)
LARGE = 2**63 + 5
ROOT = Path(__file__).parents[2]


def rows(model: steadfast.Model, batch: dict) -> dict:
    """The parameters of a model for a batch, as a trainer passes them: the rows of its ids have irregular values."""
    parameters = {name: np.array(it) for name, it in model.initialize(1).items()}
    for (name, table), given in zip(model.tables().items(), ids_of(model, batch)):
        ids, places = np.unique(given, return_inverse=True)
        values = np.sin(np.arange(len(ids) * table.dim, dtype=np.float32)).reshape(-1, table.dim)
        parameters[name] = steadfast.Rows(ids, values, places)
    return parameters


class Sum(torch.nn.Module):
    """The sum of the values of rows."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *ids: torch.Tensor) -> torch.Tensor:
        return self.layer(*ids).flatten(1).sum(dim=1)


def squares(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).square().mean()


def model_of(module: torch.nn.Module, inputs: list) -> st.Model:
    return st.Model(module, squares, inputs=inputs, label=torch.float32)


def test_the_gradient_of_rows_is_that_of_an_embedding_in_memory():
    """S004-50: each id of a batch once, in the order of unsigned integers."""
    ids = np.array([7, LARGE, 3, 7, 2**64 - 1], np.uint64)
    batch = {"user": ids.view(np.int64), "label": np.arange(5, dtype=np.float32)}
    model = model_of(Sum(st.Embedding("user", 2)), ["user"])
    assert model.tables() == {"user": steadfast.Table(2)}
    parameters = rows(model, batch)
    assert parameters["user"].ids.tolist() == [3, 7, LARGE, 2**64 - 1]
    loss_sum, gradients = model.gradient(parameters, batch, KEY)
    weight = torch.tensor(parameters["user"].values, requires_grad=True)
    places = torch.tensor([1, 2, 0, 1, 3])
    found = torch.nn.functional.embedding(places, weight).sum(dim=1)
    loss = (found - torch.arange(5.0)).square().sum()
    loss.backward()
    assert loss_sum == pytest.approx(loss.item(), rel=1e-6)
    assert np.allclose(gradients["user"], weight.grad, rtol=1e-5)
    evaluated, _ = model.evaluate(parameters, batch)
    assert evaluated == pytest.approx(loss_sum, rel=1e-6)


def test_lists_of_any_length_are_reduced_record_by_record():
    values, offsets = np.array([4, 9, 4, 4], np.int64), np.array([0, 3, 3, 4])
    batch = {"seen": (values, offsets), "label": np.zeros(3, np.float32)}
    for mode, reduce in [("sum", np.sum), ("mean", np.mean)]:
        model = model_of(Sum(st.EmbeddingBag("seen", 2, mode=mode)), ["seen"])
        parameters = rows(model, batch)
        model.gradient(parameters, batch, KEY)
        output = model.module(torch.tensor(values), torch.tensor(offsets)).detach().numpy()
        table = parameters["seen"].values
        first = reduce(table[[0, 1, 0]], axis=0).sum()
        assert np.allclose(output, [first, 0.0, table[0].sum()], rtol=1e-5)
        square = model.module(torch.tensor([[4, 9], [9, 9]]))
        assert square.shape == (2,)


def documented():
    """What the Python code about ids in docs/tables.md defines, after a check of its values."""
    text = (ROOT / "docs" / "tables.md").read_text()
    found = {}
    for block in re.findall(r"```python\n(def .*?)```", text, re.S):
        exec(block, found)
        for expression, value in re.findall(r"^(?:\w+ = )?(\S.*\S)\s+# (0x\w+)$", block, re.M):
            assert eval(expression, found) == int(value, 16), expression
    return found


def test_text_is_hashed_with_the_name_of_its_column():
    words = np.array(["red", "blue", "red"], dtype=object)
    batch = {"colour": words, "label": np.zeros(3, np.float32)}
    model = model_of(Sum(st.Embedding("colour", 1)), ["colour"])
    (ids,) = ids_of(model, batch)

    category_id = documented()["category_id"]
    assert ids.tolist() == [category_id("colour", it.encode()) for it in words]
    assert (steadfast.category_ids("colour", [b"red", b"blue", b"red"]) == ids).all()
    assert steadfast.category_ids("color", ["red"])[0] != ids[0]
    for values in ([1], "red", b"red"):
        with pytest.raises(TypeError):
            steadfast.category_ids("colour", values)
    model.gradient(rows(model, batch), batch, KEY)


def test_layers_with_the_same_name_share_a_table():
    class Two(torch.nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.one = st.Embedding("people", 2, columns="user")
            self.other = st.Embedding("people", dim, columns=["friend"])

        def forward(self, user: torch.Tensor, friend: torch.Tensor) -> torch.Tensor:
            return (self.one(user) * self.other(friend)).sum(dim=1)

    batch = {"user": np.array([1, 2]), "friend": np.array([2, 3]), "label": np.zeros(2, np.float32)}
    model = model_of(Two(2), ["user", "friend"])
    parameters = rows(model, batch)
    assert parameters["people"].ids.tolist() == [1, 2, 3]
    _, gradients = model.gradient(parameters, batch, KEY)
    # Row 2 is in both records.
    assert (gradients["people"] != 0).all()
    with pytest.raises(steadfast.InvalidError, match="two layers have the table `people`"):
        model_of(Two(3), ["user", "friend"])


def test_ids_that_were_not_declared_are_named():
    batch = {"user": np.array([1]), "item": np.array([2]), "label": np.zeros(1, np.float32)}
    model = model_of(Sum(st.Embedding("user", 2)), ["item"])
    with pytest.raises(steadfast.InvalidError, match="ids that are not in user; pass the columns"):
        model.gradient(rows(model, batch), batch, KEY)
    absent = model_of(Sum(st.Embedding("city", 2)), ["item"])
    with pytest.raises(steadfast.InvalidError, match="no column `city`"):
        ids_of(absent, batch)
    with pytest.raises(steadfast.InvalidError, match="only `steadfast.torch.Model`"):
        st.Embedding("user", 2)(torch.tensor([1]))


def test_ids_are_integers():
    assert as_ids("user", np.array([-1, 2], np.int32)).tolist() == [2**64 - 1, 2]
    assert as_ids("user", [LARGE]).tolist() == [LARGE]
    assert as_ids("user", torch.tensor([-1])).tolist() == [2**64 - 1]
    assert as_ids("user", np.array([], np.float32)).tolist() == []
    with pytest.raises(steadfast.InvalidError, match="ids of `user` are float32"):
        as_ids("user", np.array([1.0], np.float32))

    class Rounded(Sum):
        def forward(self, *ids):
            return super().forward(*(it.to(torch.float32) for it in ids))

    batch = {"user": np.array([1]), "label": np.zeros(1, np.float32)}
    model = model_of(Rounded(st.Embedding("user", 2)), ["user"])
    with pytest.raises(steadfast.InvalidError, match="ids of `user` are torch.float32"):
        model.gradient(rows(model, batch), batch, KEY)


def test_values_of_a_table_are_checked():
    assert steadfast.Table(2, "zeros").initial == ("zeros", 0.0)
    for initial in ["ones", ("normal", -1.0), ("normal", float("nan")), ("normal",), ("poisson", 1.0)]:
        with pytest.raises(steadfast.InvalidError, match="`initial` is"):
            steadfast.Table(2, initial)
    for dim in (0, 4097, 2.5, "8", True):
        with pytest.raises(steadfast.InvalidError, match="`dim` is"):
            steadfast.Table(dim)
    with pytest.raises(steadfast.InvalidError, match="`mode` is"):
        st.EmbeddingBag("seen", 2, mode="max")


def test_ids_of_a_table_that_does_not_exist_are_refused():
    stray = SimpleNamespace(tables=dict, ids=lambda batch: {"users": [1]})
    with pytest.raises(steadfast.InvalidError, match="ids of `users`, which is not among the tables"):
        ids_of(stray, {})
