"""What a module may contain, without processes."""

from __future__ import annotations

import json
import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import steadfast
from conftest import EXAMPLES

torch = pytest.importorskip("torch")
st = pytest.importorskip("steadfast.torch")
_loss = pytest.importorskip("steadfast._loss")
_state = pytest.importorskip("steadfast._state")
safetensors = pytest.importorskip("safetensors")
pytest.importorskip("safetensors.torch")
_tensor_file = pytest.importorskip("steadfast._tensor_file")

KEY = SimpleNamespace(seed=5)
LOSS = torch.nn.functional.cross_entropy


def batch(records: int) -> dict:
    generator = np.random.default_rng(records)
    features = generator.standard_normal((records, 6)).astype(np.float32)
    return {"features": features, "label": (features[:, 0] > 0).astype(np.float32)}


def read_only(model: st.Model) -> dict:
    """The initial parameters, as a trainer passes them."""
    parameters = {name: np.array(it) for name, it in model.initialize(1).items()}
    for array in parameters.values():
        array.flags.writeable = False
    return parameters


def normalized() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def test_the_gradient_is_that_of_the_sum_of_the_losses():
    net = torch.nn.Linear(6, 2)
    model = st.Model(net, LOSS)
    records = batch(5)
    parameters = read_only(model)
    loss_sum, gradients = model.gradient(parameters, records, KEY)
    twin = torch.nn.Linear(6, 2)
    twin.load_state_dict({name: torch.tensor(it) for name, it in parameters.items()})
    label = torch.tensor(records["label"]).long()
    expected = LOSS(twin(torch.tensor(records["features"])), label, reduction="sum")
    expected.backward()
    assert loss_sum == pytest.approx(expected.item(), rel=1e-6)
    assert np.allclose(gradients["weight"], twin.weight.grad, rtol=1e-4, atol=1e-6)


def test_dropout_depends_on_the_key_alone():
    net = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(6, 2))
    model = st.Model(net, LOSS)
    parameters, records = read_only(model), batch(8)

    def weight(seed: int) -> np.ndarray:
        _, gradients = model.gradient(parameters, records, SimpleNamespace(seed=seed))
        return gradients["1.weight"].copy()

    first = weight(1)
    assert (weight(2) != first).any()
    assert (weight(1) == first).all()


def test_buffers_are_not_lost_silently():
    with pytest.raises(steadfast.InvalidError, match='`1.running_mean`.*buffers="mean"'):
        st.Model(normalized(), LOSS)
    with pytest.raises(steadfast.InvalidError, match='use "mean" or "constant"'):
        st.Model(normalized(), LOSS, buffers="sum")
    constant = st.Model(normalized(), LOSS, buffers="constant")
    with pytest.raises(steadfast.InvalidError, match="changes the buffer `1.running_mean`"):
        constant.gradient(read_only(constant), batch(4), KEY)


def test_the_mean_of_the_changes_of_buffers_is_what_batchnorm_computes():
    model = st.Model(normalized(), LOSS, buffers="mean")
    names = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert set(model.averaged()) == names
    parameters = read_only(model)
    _, gradients = model.gradient(parameters, batch(4), KEY)
    after = {name: parameters[name] + gradients[name] / 4 for name in names}

    twin = normalized()
    twin.load_state_dict({name: torch.tensor(it) for name, it in parameters.items()})
    twin.train()(torch.tensor(batch(4)["features"]))
    for name in names:
        assert np.allclose(after[name], twin.state_dict()[name], rtol=1e-5), name
    # Evaluation uses the averages, and does not change them.
    before = model.evaluate(parameters, batch(4))
    assert model.evaluate(parameters, batch(4)) == before


def test_a_module_that_normalizes_over_records_needs_two():
    model = st.Model(normalized(), LOSS, buffers="mean")
    assert model.min_records == 2
    with pytest.raises(steadfast.InvalidError, match="cannot normalize.*of one record.*`min_records = 2`"):
        model.gradient(read_only(model), batch(1), KEY)
    assert st.Model(normalized().eval(), LOSS, buffers="constant").min_records == 1
    assert st.Model(normalized(), LOSS, buffers="mean", min_records=1).min_records == 1
    assert st.Model(torch.nn.Linear(6, 2), LOSS).min_records == 1


class Rebinding(torch.nn.Module):
    """Replaces its buffers instead of changing them."""

    def __init__(self, persistent):
        super().__init__()
        self.layer = torch.nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(6), persistent=persistent)

    def forward(self, features):
        self.seen = self.seen + features.detach().mean(dim=0)
        return self.layer(features + self.seen)


def test_a_buffer_that_the_module_replaces_is_followed():
    model = st.Model(Rebinding(persistent=True), LOSS, buffers="mean")
    parameters, records = read_only(model), batch(4)
    first = model.gradient(parameters, records, KEY)
    assert np.allclose(first[1]["seen"], records["features"].sum(axis=0), atol=1e-5)
    again = model.gradient(parameters, records, KEY)
    assert first[0] == again[0] and (first[1]["seen"] == again[1]["seen"]).all()
    constant = st.Model(Rebinding(persistent=True), LOSS, buffers="constant")
    with pytest.raises(steadfast.InvalidError, match="changes the buffer `seen`"):
        constant.gradient(read_only(constant), records, KEY)
    # A buffer outside of the state has its first value in each computation.
    outside = st.Model(Rebinding(persistent=False), LOSS)
    parameters = read_only(outside)
    loss_sum, _ = outside.gradient(parameters, records, KEY)
    assert outside.gradient(parameters, records, KEY)[0] == loss_sum


class Sharing(torch.nn.Module):
    """Two layers of BatchNorm with the same running statistics."""

    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.BatchNorm1d(6), torch.nn.BatchNorm1d(6)
        self.output = torch.nn.Linear(6, 2)
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            setattr(self.two, name, getattr(self.one, name))

    def forward(self, features):
        return self.output(self.two(self.one(features)))


def test_a_buffer_that_layers_share_stays_shared():
    net = Sharing()
    model = st.Model(net, LOSS, buffers="mean")
    assert set(model.averaged()) == {"one.running_mean", "one.running_var", "one.num_batches_tracked"}
    parameters = {name: np.array(it) for name, it in read_only(model).items()}
    parameters["one.running_mean"][:] = 3
    loss_sum, _ = model.evaluate(parameters, batch(8))
    twin = Sharing().eval()
    twin.load_state_dict({name: torch.tensor(it) for name, it in parameters.items()}, strict=False)
    assert twin.two.running_mean.tolist() == [3] * 6
    expected = LOSS(twin(torch.tensor(batch(8)["features"])), torch.tensor(batch(8)["label"]).long(), reduction="sum")
    assert loss_sum == pytest.approx(expected.item(), rel=1e-5)
    # Both layers change it.
    _, gradients = model.gradient(parameters, batch(8), KEY)
    assert gradients["one.num_batches_tracked"] / 8 == 2
    assert net.one.running_mean is net.two.running_mean


def test_a_shared_buffer_that_one_layer_replaces_is_refused():
    class Replacing(Sharing):
        def forward(self, features):
            self.two.running_mean = self.one.running_mean + 1
            return super().forward(features)

    model = st.Model(Replacing(), LOSS, buffers="mean")
    with pytest.raises(steadfast.InvalidError, match="replaces the buffer `one.running_mean`.*in place"):
        model.gradient(read_only(model), batch(8), KEY)

    class Changing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = (torch.nn.Linear(6, 2) for _ in range(2))
            self.one.register_buffer("scale", torch.ones(2))
            self.two.register_buffer("scale", self.one.scale)

        def forward(self, features):
            self.two.scale = self.two.scale + 1
            return self.two(features) * self.two.scale + self.one(features)

    model = st.Model(Changing(), LOSS, buffers="constant")
    with pytest.raises(steadfast.InvalidError, match="changes the buffer `one.scale`"):
        model.gradient(read_only(model), batch(8), KEY)


def test_a_module_that_is_moved_still_shares_its_buffers():
    net = Sharing()
    places = _state.move(net, torch.device("meta"))
    assert net.two.running_mean.device.type == "meta"
    assert net.one.running_mean is net.two.running_mean and len(places["one.running_mean"]) == 2


def test_code_that_changes_parameters_in_place_changes_no_other_computation():
    class Renormalizing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(4, 6, max_norm=0.1)
            self.output = torch.nn.Linear(6, 2)

        def forward(self, features):
            return self.output(self.embedding((features[:, 0] > 0).long()))

    model = st.Model(Renormalizing(), LOSS)
    parameters = read_only(model)
    before = parameters["embedding.weight"].copy()
    model.gradient(parameters, batch(4), KEY)
    assert (parameters["embedding.weight"] == before).all()


def test_layers_in_evaluation_mode_stay_so():
    net = normalized()
    net[1].eval()
    model = st.Model(net, LOSS, buffers="constant")
    model.evaluate(read_only(model), batch(4))
    model.gradient(read_only(model), batch(4), KEY)
    assert net[0].training and not net[1].training


def test_a_long_batch_is_evaluated_in_parts():
    metric = {"accuracy": st.accuracy}
    model = st.Model(torch.nn.Linear(6, 2), LOSS, metrics=metric)
    parameters = read_only(model)
    whole, records = batch(2500), 2500
    loss_sum, correct = model.evaluate(parameters, whole)
    one = {name: column[:records] for name, column in whole.items()}
    twin = torch.nn.Linear(6, 2)
    twin.load_state_dict({name: torch.tensor(it) for name, it in parameters.items()})
    label = torch.tensor(one["label"]).long()
    output = twin(torch.tensor(one["features"]))
    assert loss_sum == pytest.approx(LOSS(output, label, reduction="sum").item(), rel=1e-5)
    assert correct == (output.argmax(dim=1) == label).sum().item()


WEIGHTS = torch.tensor([1.0, 5.0])
IGNORED = torch.nn.CrossEntropyLoss(ignore_index=1)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("loss", "reduction", "remedy"),
    [
        (torch.nn.CrossEntropyLoss(reduction="sum"), "mean", 'has `reduction="sum"`'),
        (torch.nn.CrossEntropyLoss(), "sum", 'has `reduction="mean"`'),
        (lambda o, y: LOSS(o, y, reduction="sum"), "mean", 'pass `reduction="sum"`'),
        (LOSS, "sum", 'pass `reduction="mean"`'),
        (torch.nn.CrossEntropyLoss(weight=WEIGHTS), "mean", "class weights"),
        (IGNORED, "mean", "class weights"),
        (lambda o, y: LOSS(o, y, weight=WEIGHTS), "mean", 'class weights.*`reduction="weighted"`'),
        (lambda o, y: IGNORED(o, y), "mean", 'class weights.*`reduction="weighted"`'),
        (lambda o, y: LOSS(o @ o.T, torch.arange(len(o))), "mean", 'contrastive.*`reduction="coupled"`'),
        (lambda o, y: (o - o.mean(dim=0)).square().mean(), "mean", 'contrastive.*`reduction="coupled"`'),
    ],
)
def test_a_loss_that_is_not_what_its_model_says_is_refused(loss, reduction, remedy):
    with pytest.raises(steadfast.InvalidError, match=remedy):
        model = st.Model(torch.nn.Linear(6, 2), loss, reduction=reduction)
        model.gradient(read_only(model), batch(8), KEY)
    with pytest.raises(steadfast.InvalidError, match=remedy):
        model = st.Model(torch.nn.Linear(6, 2), loss, reduction=reduction)
        model.evaluate(read_only(model), batch(8))


def test_a_mean_over_the_tokens_of_sequences_with_padding_is_refused():
    class Tokens(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = torch.nn.Embedding(9, 9)

        def forward(self, words):
            return self.rows(words).transpose(1, 2)

    words = np.arange(4 * 5).reshape(4, 5) % 9
    following = np.where(np.arange(5) < np.array([[1], [5], [2], [4]]), (words + 1) % 9, -100)
    records = {"words": words, "following": following}
    mean = st.Model(Tokens(), LOSS, inputs="words", target="following")
    with pytest.raises(steadfast.InvalidError, match='padding use `reduction="weighted"`'):
        mean.gradient(read_only(mean), records, KEY)
    total = st.Model(
        Tokens(), torch.nn.CrossEntropyLoss(reduction="sum"), reduction="sum", inputs="words", target="following"
    )
    parameters = read_only(total)
    parts = [
        total.gradient(parameters, {name: it[at : at + 1] for name, it in records.items()}, KEY)[0] for at in range(4)
    ]
    assert total.gradient(parameters, records, KEY)[0] == pytest.approx(sum(parts), rel=1e-5)


def of_tokens(output, label):
    """The sum over the tokens that are not padding, and their number."""
    return LOSS(output, label, reduction="sum"), (label != -100).sum()


def test_a_loss_with_its_weight_counts_what_is_not_padding():
    words = np.arange(4 * 5).reshape(4, 5) % 9
    following = np.where(np.arange(5) < np.array([[1], [5], [0], [4]]), (words + 1) % 9, -100)
    records = {"words": words, "following": following}
    net = torch.nn.Sequential(torch.nn.Embedding(9, 9), torch.nn.Flatten(), torch.nn.Unflatten(1, (9, 5)))
    model = st.Model(net, of_tokens, reduction="weighted", inputs="words", target="following")
    parameters = read_only(model)
    (whole, weight), gradients = model.gradient(parameters, records, KEY)
    whole_gradient = gradients["0.weight"].copy()
    assert weight == 10
    sums, parts = 0.0, np.zeros_like(whole_gradient)
    for at in range(4):
        (loss, count), gradients = model.gradient(
            parameters, {name: it[at : at + 1] for name, it in records.items()}, KEY
        )
        assert count == [1, 5, 0, 4][at]
        sums, parts = sums + loss, parts + gradients["0.weight"]
    assert sums == pytest.approx(whole, rel=1e-5) and np.allclose(parts, whole_gradient, atol=1e-6)
    assert model.evaluate(parameters, records)[0] == (pytest.approx(whole, rel=1e-6), 10.0)


def weighted_loss(output, label, weight):
    return (LOSS(output, label, reduction="none") * weight).sum(), weight.sum()


def test_records_count_by_the_column_of_their_weights():
    metrics = {"accuracy": st.accuracy, "twice": lambda o, y: (2 * st.accuracy(o, y), torch.ones(len(y)))}
    model = st.Model(torch.nn.Linear(6, 2), weighted_loss, metrics=metrics, reduction="weighted", weight="weight")
    parameters, plain = read_only(model), batch(4)
    weights = np.array([2.0, 0.0, 1.0, 0.5], dtype=np.float32)
    records = {**plain, "weight": weights}
    (loss_sum, weight), gradients = model.gradient(parameters, records, KEY)
    found = gradients["weight"].copy()
    assert weight == 3.5
    each = [{name: it[at : at + 1] for name, it in plain.items()} for at in range(4)]
    other = st.Model(torch.nn.Linear(6, 2), LOSS)
    expected = np.zeros_like(found)
    for at, record in enumerate(each):
        expected += weights[at] * other.gradient(parameters, record, KEY)[1]["weight"]
    assert np.allclose(found, expected, atol=1e-6)
    (loss, _), (correct, of_metric), further = model.evaluate(parameters, records)
    assert loss == pytest.approx(loss_sum, rel=1e-6) and of_metric == 3.5
    assert further["twice"] == (pytest.approx(2 * correct), 3.5)
    for bad, message in ((-weights, "not a finite number from 0"), (weights[:, None], "no number for each record")):
        with pytest.raises(steadfast.InvalidError, match=message):
            model.gradient(parameters, {**plain, "weight": bad}, KEY)
    with pytest.raises(steadfast.InvalidError, match="no column `weight`"):
        model.gradient(parameters, plain, KEY)


@pytest.mark.parametrize(
    ("weight", "found"),
    [
        (lambda label: 1.0, "records is 1, and the weights of each of them add up to 8"),
        (lambda label: label.float().mean(), "of each of them add up to"),
        (lambda label: (label == 5).sum().clamp(min=1), "without a least value"),
        (lambda label: torch.ones(()).to(torch.bfloat16), "add up to 8"),
    ],
)
def test_a_weight_that_is_not_the_sum_of_those_of_its_records_is_refused(weight, found):
    loss = lambda output, label: (LOSS(output, label, reduction="sum"), weight(label))  # noqa: E731
    model = st.Model(torch.nn.Linear(6, 2), loss, reduction="weighted")
    parameters, records = read_only(model), batch(8)
    for compute in (lambda: model.gradient(parameters, records, KEY), lambda: model.evaluate(parameters, records)):
        with pytest.raises(steadfast.InvalidError, match=f"the weight of the loss of 8 .*{found}"):
            compute()


@pytest.mark.parametrize("kind", [int, float, torch.tensor, lambda count: torch.tensor([count], dtype=torch.bfloat16)])
def test_a_weight_is_a_number_of_any_type(kind):
    loss = lambda output, label: (LOSS(output, label, reduction="sum"), kind(len(label)))  # noqa: E731
    for min_records in (1, 3):
        model = st.Model(torch.nn.Linear(6, 2), loss, reduction="weighted", min_records=min_records)
        assert model.gradient(read_only(model), batch(8), KEY)[0][1] == 8


def test_further_losses_are_checked_as_the_loss_is():
    def evaluated(reduction, loss, further, **more):
        model = st.Model(torch.nn.Linear(6, 2), loss, losses={"spread": further}, reduction=reduction, **more)
        records = {**batch(8), "weight": np.arange(8, dtype=np.float32)}
        return model.evaluate(read_only(model), records)[2]["spread"]

    evaluated("mean", LOSS, lambda o, y: o.square().mean())
    with pytest.raises(steadfast.InvalidError, match="the loss `spread` of 8 records is .*; pass `reduction=.sum.`"):
        evaluated("mean", LOSS, lambda o, y: o.square().sum())
    with pytest.raises(steadfast.InvalidError, match="the weight of the loss `spread` of 8 records is 1,"):
        evaluated("weighted", weighted_loss, lambda o, y, w: (o.square().sum(), 1.0), weight="weight")
    assert evaluated("weighted", weighted_loss, weighted_loss, weight="weight")[1] == 28


def test_weights_that_the_loss_does_not_get_are_refused():
    def summed(output, label):
        return LOSS(output, label, reduction="sum"), len(label)

    def made(**more):
        model = st.Model(torch.nn.Linear(6, 2), summed, reduction="weighted", **more)
        return model, read_only(model)

    model, parameters = made()
    records = {**batch(4), "weight": np.ones(4, dtype=np.float32)}
    for compute in (lambda: model.gradient(parameters, records, KEY), lambda: model.evaluate(parameters, records)):
        with pytest.raises(steadfast.InvalidError, match='which the loss does not get; pass `weight="weight"`'):
            compute()
    model, parameters = made(transform=lambda given, key: {name: given[name] for name in ("features", "label")})
    assert model.gradient(parameters, model.transform(records, KEY), KEY)[0][1] == 4
    # A column of this name that the module or the loss takes is another one.
    heavy = {"weight": records["features"], "label": records["label"]}
    model, parameters = made(inputs="weight")
    assert model.gradient(parameters, heavy, KEY)[0][1] == 4


def test_a_loss_and_its_reduction_agree_about_weights():
    def made(loss, reduction, **more):
        model = st.Model(torch.nn.Linear(6, 2), loss, reduction=reduction, **more)
        return model.gradient(read_only(model), batch(8), KEY)

    with pytest.raises(steadfast.InvalidError, match="the loss is the shape.*return a pair"):
        made(lambda o, y: LOSS(o, y), "weighted")
    with pytest.raises(steadfast.InvalidError, match='the loss is a pair; pass `reduction="weighted"`'):
        made(lambda o, y: (LOSS(o, y), 1), "mean")
    with pytest.raises(steadfast.InvalidError, match="not their sum; return the sum of what counts and its weight"):
        made(lambda o, y: (LOSS(o, y), len(y)), "weighted")
    with pytest.raises(steadfast.InvalidError, match="`CrossEntropyLoss` returns one number"):
        made(torch.nn.CrossEntropyLoss(), "weighted")
    with pytest.raises(steadfast.InvalidError, match='`weight` names the column `w`.*use "weighted"'):
        made(LOSS, "mean", weight="w")


def squares(output, label):
    return (output - label).square().mean()


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("label", [None, torch.int64, torch.float32])
@pytest.mark.parametrize("loss", [torch.nn.functional.mse_loss, torch.nn.L1Loss(), squares])
def test_a_loss_that_compares_each_with_each_is_refused(loss, label):
    model = st.Model(torch.nn.Linear(6, 1), loss, label=label)
    with pytest.raises(steadfast.InvalidError, match=r"\[8, 1\], the labels \[8\].*Flatten\(0\)"):
        model.gradient(read_only(model), batch(8), KEY)


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (lambda o, y: LOSS(o, y, weight=WEIGHTS, reduction="sum"), "sum"),
        (torch.nn.CrossEntropyLoss(label_smoothing=0.1), "mean"),
        (torch.nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), "mean"),
        (lambda o, y: torch.nn.functional.dropout(o, 0.5).square().mean(), "mean"),
        (lambda o, y: LOSS(o @ o.T, torch.arange(len(o))), "coupled"),
        (lambda o, y: LOSS(o, y) + 0.1 * WEIGHTS.square().sum(), "mean"),
    ],
)
def test_a_loss_of_records_is_not_refused(loss, reduction):
    model = st.Model(torch.nn.Linear(6, 2), loss, reduction=reduction)
    records = batch(8)
    if isinstance(loss, torch.nn.BCEWithLogitsLoss):
        records["label"] = np.stack([records["label"], 1 - records["label"]], axis=1)
    model.gradient(read_only(model), records, KEY)
    model.evaluate(read_only(model), records)


def test_a_check_of_a_loss_does_not_call_the_module_or_draw_random_numbers():
    calls = []

    class Counting(torch.nn.Linear):
        def forward(self, features):
            calls.append(len(features))
            return super().forward(features)

    net = torch.nn.Sequential(Counting(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    noisy = st.Model(
        torch.nn.Sequential(net, torch.nn.Linear(4, 2)),
        lambda o, y: torch.nn.functional.dropout(LOSS(o, y, reduction="none"), 0.5).mean(),
        buffers="mean",
    )
    noisy.gradient(read_only(noisy), batch(8), KEY)
    drawn = torch.rand(1)
    noisy._loss_check.sample = lambda output, label: None
    noisy.gradient(read_only(noisy), batch(8), KEY)
    assert torch.rand(1) == drawn and calls == [8, 8]


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (LOSS, torch.int64),
        (torch.nn.MSELoss(), torch.int64),
        (torch.nn.BCEWithLogitsLoss(), torch.float32),
        (lambda o, y: torch.nn.functional.binary_cross_entropy(o.sigmoid(), y), torch.float32),
    ],
)
def test_the_type_of_labels_follows_the_loss(loss, kind):
    seen = []

    def watched(output, label):
        found = loss(output, label)
        seen.append(label.dtype)
        return found

    is_class = loss is LOSS
    net = torch.nn.Linear(6, 2) if is_class else torch.nn.Sequential(torch.nn.Linear(6, 1), torch.nn.Flatten(0))
    model = st.Model(net, watched)
    parameters = read_only(model)
    loss_sum, gradients = model.gradient(parameters, batch(8), KEY)
    assert set(seen) - {kind} == set() or seen[0] == torch.float32
    explicit = st.Model(net, loss, label=kind)
    again, same = explicit.gradient(parameters, batch(8), KEY)
    assert loss_sum == again and all((it == same[name]).all() for name, it in gradients.items())
    if not is_class:
        half = {**batch(8), "label": batch(8)["label"] / 2}
        explicit = st.Model(net, loss, label=torch.float32)
        assert model.gradient(parameters, half, KEY)[0] == explicit.gradient(parameters, half, KEY)[0]


def test_labels_that_a_loss_does_not_take_are_named():
    records = batch(8)
    records["label"][5] = 7
    model = st.Model(torch.nn.Linear(6, 2), LOSS)
    told = r"record 5 of a micro-batch of 8, whose label is 7: .*2 classes, from 0 to 1"
    with pytest.raises(steadfast.InvalidError, match=told):
        model.gradient(read_only(model), records, KEY)
    net = torch.nn.Sequential(torch.nn.Linear(6, 1), torch.nn.Flatten(0))
    numbers = st.Model(net, torch.nn.BCEWithLogitsLoss(), label=torch.int64)
    with pytest.raises(steadfast.InvalidError, match="does not take labels of torch.int64.*`label=torch.float32`"):
        numbers.gradient(read_only(numbers), batch(8), KEY)


def test_a_record_that_a_layer_does_not_take_is_named():
    class Looked(torch.nn.Module):
        def __init__(self, sparse):
            super().__init__()
            self.words = torch.nn.Embedding(10, 2, sparse=sparse)

        def forward(self, words):
            return self.words(words)

    records = {"words": np.array([3, 12, 1]), "label": np.array([0, 1, 1])}
    model = st.Model(Looked(False), LOSS, inputs="words")
    with pytest.raises(steadfast.InvalidError, match=r"record 1 of .* of 3, whose words are \[12\].*`num_embeddings`"):
        model.gradient(read_only(model), records, KEY)
    records["words"][1] = 2
    sparse = st.Model(Looked(True), LOSS, inputs="words")
    with pytest.raises(steadfast.InvalidError, match="gradient of `words.weight` is sparse; .*`sparse=True`"):
        sparse.gradient(read_only(sparse), records, KEY)


def test_a_metric_of_all_records_is_refused():
    mean = {"accuracy": lambda output, label: st.accuracy(output, label).mean()}
    model = st.Model(torch.nn.Linear(6, 2), LOSS, metrics=mean)
    with pytest.raises(steadfast.InvalidError, match=r"has the shape \[\]; return one value for each record"):
        model.evaluate(read_only(model), batch(3))
    number = {"accuracy": lambda output, label: st.accuracy(output, label).sum().item()}
    model = st.Model(torch.nn.Linear(6, 2), LOSS, metrics=number)
    with pytest.raises(steadfast.InvalidError, match="has a float; return one value for each record"):
        model.evaluate(read_only(model), batch(3))


@pytest.mark.parametrize("records", [8, 1])
@pytest.mark.parametrize(
    ("metric", "remedy"),
    [
        (lambda o, y: ((o > 0).float() == y).float(), r"output \[{0}, 1\], the labels \[{0}\].*`squeeze\(1\)`"),
        (lambda o, y: ((o > 0).float() == y[:, None]).float(), r"shape \[{0}, 1\].*`squeeze\(1\)`"),
        (lambda o, y: (o - y[:, None]).abs().expand(-1, 5), r"shape \[{0}, 5\].*`\.flatten\(1\)\.mean\(dim=1\)`"),
    ],
)
def test_a_metric_that_compares_each_with_each_is_refused(metric, remedy, records):
    def loss(output, label):
        return torch.nn.functional.binary_cross_entropy_with_logits(output.squeeze(1), label)

    model = st.Model(torch.nn.Linear(6, 1), loss, metrics={"accuracy": metric}, label=torch.float32)
    with pytest.raises(steadfast.InvalidError, match=remedy.format(records)):
        model.evaluate(read_only(model), batch(records))


def test_accuracy_refuses_a_single_output_and_labels_of_another_shape():
    label = torch.tensor([0, 1, 1, 0])
    for output in (torch.rand(4, 1), torch.rand(4)):
        with pytest.raises(steadfast.InvalidError, match="one logit.*output.flatten"):
            st.accuracy(output, label)
    output = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    with pytest.raises(steadfast.InvalidError, match=r"these have \[4, 1\]; squeeze the label.*label.squeeze\(-1\)"):
        st.accuracy(output, label[:, None])
    with pytest.raises(steadfast.InvalidError, match=r"these have \[4, 2\]; take the class.*argmax"):
        st.accuracy(output, output)
    with pytest.raises(steadfast.InvalidError, match=r"these have \[3\]"):
        st.accuracy(output, label[:3])
    assert st.accuracy(output, label).tolist() == [1, 0, 1, 0]
    # Of tokens, which a metric adds up itself.
    tokens = st.accuracy(output.view(2, 2, 2), label.view(2, 2))
    assert tokens.tolist() == [[1, 0], [1, 0]]


def test_several_metrics_and_losses_are_summed_each():
    metrics = {
        "accuracy": st.accuracy,
        "confident": lambda output, label: (output.softmax(1).amax(1) > 0.6).float(),
        # Of the records of one class alone.
        "recall": lambda output, label: (st.accuracy(output, label) * label, label.float()),
    }
    losses = {"spread": lambda output, label: output.square().mean()}
    model = st.Model(torch.nn.Linear(6, 2), LOSS, metrics=metrics, losses=losses)
    assert (model.metric_name, model.further_metrics) == ("accuracy", ["confident", "recall", "spread"])
    parameters, records = read_only(model), batch(2500)
    _, correct, further = model.evaluate(parameters, records)
    output = torch.tensor(records["features"]) @ torch.tensor(parameters["weight"]).T + torch.tensor(parameters["bias"])
    label = torch.tensor(records["label"])
    is_right = output.argmax(dim=1) == label
    assert correct == is_right.sum().item()
    assert further["confident"] == pytest.approx((output.softmax(1).amax(1) > 0.6).sum().item(), abs=2)
    assert further["recall"] == (is_right[label == 1].sum().item(), label.sum().item())
    assert further["spread"] == pytest.approx(2500 * output.square().mean().item(), rel=1e-4)


def test_the_area_under_the_curve_ranks_all_records():
    metrics = {
        "accuracy": st.accuracy,
        "auc": st.auc,
        "first": lambda output, label: steadfast.Ranked(output[:, 0], label),
    }
    model = st.Model(torch.nn.Linear(6, 2), LOSS, metrics=metrics)
    parameters, records = read_only(model), batch(2500)
    further = model.evaluate(parameters, records)[2]
    output = torch.tensor(records["features"]) @ torch.tensor(parameters["weight"]).T + torch.tensor(parameters["bias"])
    assert further["auc"].scores == pytest.approx((output[:, 1] - output[:, 0]).numpy(), abs=1e-5)
    assert further["first"].scores == pytest.approx(output[:, 0].numpy(), abs=1e-5)
    assert further["auc"].positive.tolist() == records["label"].tolist() and further["auc"].weights is None

    logits, label = torch.tensor([[1.0], [-2.0]]), torch.tensor([1, 0])
    assert st.auc(logits, label[:, None]).scores.tolist() == st.auc(logits.flatten(), label).scores.tolist() == [1, -2]
    with pytest.raises(steadfast.InvalidError, match=r"the output of 2 records has the shape \[2, 3\]; rank one class"):
        st.auc(torch.zeros(2, 3), label)
    alone = st.Model(torch.nn.Linear(6, 2), LOSS, metrics={"auc": st.auc})
    with pytest.raises(steadfast.InvalidError, match="`auc`, the first metric, ranks records"):
        alone.evaluate(parameters, records)


def test_names_of_metrics_and_losses_differ():
    def made(metrics=None, **losses):
        return st.Model(torch.nn.Linear(6, 2), LOSS, metrics=metrics, losses=losses)

    with pytest.raises(steadfast.InvalidError, match="`metrics` and `losses` both have `spread`"):
        made({"spread": st.accuracy}, spread=LOSS)
    # Also alone: its sum would be added to that of the loss.
    for taken in ({"metrics": {"accuracy": st.accuracy, "loss": st.accuracy}}, {"metrics": {"loss": st.accuracy}}):
        with pytest.raises(steadfast.InvalidError, match="is named `loss`, as that of the job is; rename it"):
            made(**taken)
    with pytest.raises(steadfast.InvalidError, match="is named `loss`, as that of the job is; rename it"):
        made(loss=LOSS)
    for column in ("seconds", "step", "examples", "metric"):
        with pytest.raises(steadfast.InvalidError, match=f"is named `{column}`, as a column of curves is; rename it"):
            made({"accuracy": st.accuracy, column: st.accuracy})
        with pytest.raises(steadfast.InvalidError, match=f"is named `{column}`, as a column of curves is; rename it"):
            made(**{column: LOSS})
    with pytest.raises(steadfast.InvalidError, match="`metrics` is empty"):
        made({})
    with pytest.raises(steadfast.InvalidError, match="a metric is named 3"):
        made({3: st.accuracy})
    # Without a metric the loss is shown as one.
    assert (made(spread=LOSS).metric_name, made(spread=LOSS).further_metrics) == ("loss", ["spread"])


def test_the_metric_of_one_logit_is_that_of_its_example():
    net = torch.nn.Sequential(torch.nn.Linear(6, 1), torch.nn.Flatten(0))
    metric = {"accuracy": lambda output, label: ((output.flatten() > 0) == label).float()}
    model = st.Model(net, torch.nn.BCEWithLogitsLoss(), metrics=metric)
    parameters, records = read_only(model), batch(8)
    _, correct = model.evaluate(parameters, records)
    found = records["features"] @ parameters["0.weight"][0] + parameters["0.bias"] > 0
    assert correct == (found == records["label"]).sum()


def test_frozen_parameters_are_part_of_the_fingerprint():
    def fingerprint(value: float) -> str:
        net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 2))
        torch.nn.init.constant_(net[0].weight, value).requires_grad_(False)
        torch.nn.init.constant_(net[0].bias, value).requires_grad_(False)
        return st.Model(net, LOSS).numerics()

    assert fingerprint(1.0) == fingerprint(1.0)
    assert fingerprint(1.0) != fingerprint(2.0)


def test_tied_weights_are_one_parameter_and_frozen_ones_do_not_travel():
    net = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 2))
    net[1].weight = net[0].weight
    net[2].bias.requires_grad_(False)
    assert list(st.Model(net, LOSS).parameters()) == ["0.weight", "0.bias", "1.bias", "2.weight"]


class Mixed(torch.nn.Module):
    """Tied, frozen and trained parameters, and buffers."""

    def __init__(self, fill):
        super().__init__()
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
        self.first, self.tied = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(6)
        self.output = torch.nn.Linear(6, 2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(fill)
            self.norm.running_mean.fill_(fill)

    def forward(self, features):
        return self.output(self.norm(self.tied(self.first(self.frozen(features)))))


def test_what_a_job_has_trained_is_loaded_and_all_else_stays():
    given = read_only(st.Model(Mixed(3.0), LOSS, buffers="mean"))
    assert "tied.weight" not in given and "frozen.weight" not in given
    net = Mixed(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        st.load(net, given)
    assert net.tied.weight is net.first.weight and (net.tied.weight == 3).all()
    assert (net.norm.running_mean == 3).all() and net.norm.num_batches_tracked.dtype == torch.int64
    assert (net.frozen.weight == 1).all() and net.output.weight.requires_grad
    # What the module does with its parameters later changes nothing that was given.
    assert (given["output.weight"] == 3).all() and not given["output.weight"].flags.writeable
    half = Mixed(1.0).bfloat16()
    st.load(half, {name: torch.tensor(it) for name, it in given.items()})
    assert half.output.weight.dtype == torch.bfloat16 and (half.output.weight == 3).all()


def test_parameters_that_do_not_fit_a_module_are_named_and_leave_it_as_it_was():
    given = read_only(st.Model(Mixed(3.0), LOSS, buffers="mean"))
    net = Mixed(1.0)

    def refused(message, change, **more):
        changed = dict(given)
        change(changed)
        with pytest.raises(steadfast.InvalidError, match=message):
            st.load(net, changed, **more)
        assert all((it == 1).all() for it in net.parameters()) and (net.norm.running_mean == 1).all()

    refused("`output.bias` is missing$", lambda it: it.pop("output.bias"))
    refused("`norm.running_var` is missing$", lambda it: it.pop("norm.running_var"))
    refused("`head.bias` is not trained in this module", lambda it: it.update({"head.bias": np.zeros(2)}))
    frozen = r"`frozen.bias` has the shape \[2\]"
    refused(frozen, lambda it: it.update({"frozen.bias": np.zeros(2)}))
    shape = r"`output.weight` has the shape \[10, 6\], and in the module \[2, 6\]"
    refused(shape, lambda it: it.update({"output.weight": np.zeros((10, 6), np.float32)}))

    def prefixed(names):
        for name in list(names):
            names["module." + name] = names.pop(name)

    refused("`first.weight`, .* and 3 more|2 more are missing.*`module.first.weight`", prefixed)
    refused('norm.num_batches_tracked` are missing .pass `buffers="constant"`', without_buffers)
    refused('`buffers` is "max"', lambda it: None, buffers="max")
    without_buffers(given)
    st.load(net, given, buffers="constant")
    assert (net.output.weight == 3).all() and (net.norm.running_mean == 1).all()
    with pytest.raises(steadfast.InvalidError, match="wrapped in DataParallel"):
        st.load(torch.nn.DataParallel(net), given)


def without_buffers(parameters):
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        del parameters[name]


def test_a_model_file_is_loaded_by_its_path(tmp_path):
    weight, bias = np.arange(12, dtype="<f4"), np.ones(2, "<f4")
    places = {"weight": [[2, 6], 0, 48], "bias": [[2], 48, 56]}
    head = {name: {"dtype": "F32", "shape": shape, "data_offsets": at} for name, (shape, *at) in places.items()}
    text = json.dumps(head).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + weight.tobytes() + bias.tobytes())
    for path in (file, str(file)):
        net = torch.nn.Linear(6, 2)
        st.load(net, path)
        assert net.weight.flatten().tolist() == weight.tolist() and net.bias.tolist() == [1, 1]
    with pytest.raises(OSError):
        st.load(net, tmp_path / "missing")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(steadfast.InvalidError, match="model.safetensors is not a safetensors file: it lacks values of"):
        st.load(net, file)


class Shared(torch.nn.Module):
    """Buffers that one or both of two layers have in their state, and others that training does not change."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 2)
        scale, steps = torch.full((6,), 2.0), torch.tensor([1, 2**40])
        self.first.register_buffer("scale", scale, persistent=False)
        self.second.register_buffer("scale", scale)
        self.first.register_buffer("steps", steps)
        self.second.register_buffer("steps", steps)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.register_buffer("allowed", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.frozen = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
        self.first.weight = torch.nn.Parameter(torch.ones(6, 6))
        self.third = self.second

    def forward(self, features):
        return self.second(self.first(features) * self.second.scale)


def fixed(model, directory):
    """The tensors and the further names that a model has beside its parameters."""
    file = directory / "fixed.safetensors"
    file.write_bytes(model.fixed())
    with safetensors.safe_open(file, "pt") as found:
        tensors = {name: found.get_tensor(name) for name in found.keys()}
        return tensors, json.loads((found.metadata() or {}).get("aliases", "{}"))


@pytest.mark.parametrize("module", [lambda: Mixed(3.0), Shared])
def test_files_of_the_model_have_every_name_of_its_state(tmp_path, module):
    """What training does not change, and further names of what it does, stand beside the parameters."""
    net = module()
    built = {name: it.clone() for name, it in net.state_dict().items()}
    model = st.Model(net, LOSS, buffers="constant")
    tensors, aliases = fixed(model, tmp_path)
    whole = {**tensors, **{name: torch.tensor(it) for name, it in model.initialize(1).items()}}
    whole.update({name: whole[first] for name, first in aliases.items()})
    twin = module()
    twin.load_state_dict(whole, strict=True)
    for name, it in twin.state_dict().items():
        assert it.dtype == built[name].dtype and torch.equal(it, built[name]), name
        assert whole[name].dtype == built[name].dtype, name
    assert set(tensors).isdisjoint(model.parameters())
    assert fixed(st.Model(module(), LOSS, buffers="constant"), tmp_path)[1] == aliases


def test_a_model_whose_state_is_trained_has_nothing_beside_its_parameters():
    assert st.Model(torch.nn.Linear(6, 2), LOSS).fixed() is None
    assert st.Model(normalized(), LOSS, buffers="mean").fixed() is None


def test_a_buffer_that_a_computation_changes_is_beside_the_parameters_as_it_was_built(tmp_path):
    class Counts(torch.nn.Linear):
        def __init__(self):
            super().__init__(6, 2)
            self.register_buffer("calls", torch.tensor(7))

        def forward(self, features):
            self.calls = self.calls.clone()
            return super().forward(features)

    model = st.Model(Counts(), LOSS, buffers="constant")
    model.gradient(read_only(model), batch(4), KEY)
    assert fixed(model, tmp_path)[0]["calls"] == 7


def test_a_buffer_of_the_state_of_any_layer_is_not_lost_silently():
    """A buffer that only the second of its layers has in its state belongs to the state."""
    with pytest.raises(steadfast.InvalidError, match="the buffer `second.scale` is part of the module's state"):
        net = Shared()
        del net.first._buffers["steps"], net.second._buffers["steps"], net.mask, net.allowed
        st.Model(net, LOSS)


def test_what_stands_beside_the_parameters_is_loaded_if_it_is_given(tmp_path):
    model = st.Model(Mixed(3.0), LOSS, buffers="constant")
    tensors, aliases = fixed(model, tmp_path)
    whole = {**tensors, **{name: torch.tensor(it) for name, it in model.initialize(1).items()}}
    whole.update({name: whole[first] for name, first in aliases.items()})
    for buffers in ("mean", "constant"):
        net = Mixed(1.0)
        st.load(net, whole, buffers=buffers)
        assert all((it == 3).all() for it in net.parameters())
        assert (net.norm.running_mean == 3).all() and net.tied.weight is net.first.weight


def test_a_file_of_tensors_is_that_of_the_library(tmp_path):
    named = {"b": torch.tensor([1.5, -0.0]), "a é": torch.tensor([[1], [2**40]]), "empty": torch.zeros(0, 3)}
    named["half"] = torch.tensor([1.5, 3.0], dtype=torch.bfloat16)
    file = tmp_path / "a.safetensors"
    file.write_bytes(_tensor_file.encode({name: _state.raw(it) for name, it in named.items()}, {"k": "v"}))
    for found in (safetensors.torch.load_file(file), _state.tensors(_tensor_file.read(file)[0])):
        assert set(found) == set(named)
        assert all(torch.equal(it, named[name]) and it.dtype == named[name].dtype for name, it in found.items())
    arrays = _tensor_file.arrays(_tensor_file.read(file)[0])
    assert arrays["half"].tolist() == [1.5, 3.0] and arrays["a é"].dtype == np.int64
    assert _tensor_file.read(file)[1] == {"k": "v"}
    for content in (b"", b"abc", b"\xff" * 8 + b"{}", b"PK\x03\x04 a file of torch.save"):
        file.write_bytes(content)
        with pytest.raises(steadfast.InvalidError, match="is not a safetensors file"):
            _tensor_file.read(file)


def test_a_parameter_without_a_gradient_counts_as_zero():
    class Partly(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Linear(6, 2), torch.nn.Linear(6, 2)

        def forward(self, features):
            return self.used(features)

    model = st.Model(Partly(), LOSS)
    _, gradients = model.gradient(read_only(model), batch(3), KEY)
    assert "unused.weight" not in gradients


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (
            torch.compile,
            r"the module is wrapped in OptimizedModule, .*`_orig_mod.…`.*pass the module itself.*`module.compile\(\)`",
        ),
        (
            torch.nn.DataParallel,
            "the module is wrapped in DataParallel, .*`module.…`.*pass the module itself, `net.module`",
        ),
        (
            torch.optim.swa_utils.AveragedModel,
            "the module is wrapped in AveragedModel, .*no job calls that.*the module itself",
        ),
        (
            lambda net: torch.nn.Sequential(net, torch.compile(torch.nn.Linear(2, 2))),
            "`1` is wrapped in OptimizedModule, .*",
        ),
    ],
)
def test_a_wrapper_that_changes_the_names_of_parameters_is_refused(wrap, message):
    with pytest.raises(steadfast.InvalidError, match=message):
        st.Model(wrap(torch.nn.Linear(6, 2)), LOSS)


def test_a_module_that_is_compiled_in_place_keeps_its_names():
    net = torch.nn.Linear(6, 2)
    plain = st.Model(net, LOSS)
    parameters = read_only(plain)
    loss_sum, _ = plain.gradient(parameters, batch(4), KEY)
    net.compile(backend="eager")
    model = st.Model(net, LOSS)
    assert list(model.parameters()) == ["weight", "bias"]
    assert model.gradient(parameters, batch(4), KEY)[0] == loss_sum
    # A part without parameters that are trained has no names that matter.
    frozen = torch.compile(torch.nn.Linear(6, 6).requires_grad_(False), backend="eager")
    assert list(st.Model(torch.nn.Sequential(frozen, net), LOSS).parameters()) == ["1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (torch.nn.Linear(6, 2).half(), "float16.*float()"),
        (torch.nn.Linear(6, 2).requires_grad_(False), "no parameter"),
    ],
)
def test_modules_that_cannot_be_trained_are_rejected(net, message):
    with pytest.raises(steadfast.InvalidError, match=message):
        st.Model(net, LOSS)


def test_a_loss_without_reduction_is_rejected():
    model = st.Model(torch.nn.Linear(6, 2), torch.nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(steadfast.InvalidError, match="shape"):
        model.gradient(read_only(model), batch(3), KEY)


def test_columns_are_tensors_over_the_memory_of_their_arrays():
    class Bag(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.EmbeddingBag(10, 2, include_last_offset=True)
            self.weight = torch.nn.Linear(3, 2)

        def forward(self, words, offsets, extra):
            seen.append((words.data_ptr(), offsets.data_ptr(), extra.data_ptr()))
            return self.words(words, offsets) + self.weight(extra)

    seen: list = []
    words, offsets = np.array([1, 2, 3, 9]), np.array([0, 2, 2, 4])
    extra = np.ones((3, 3), np.float32)
    records = {"words": (words, offsets), "extra": extra, "class": np.array([0, 1, 1])}
    model = st.Model(Bag(), LOSS, inputs=["words", "extra"], target="class")
    parameters = read_only(model)
    _, gradients = model.gradient(parameters, records, KEY)
    assert np.count_nonzero(gradients["words.weight"].any(axis=1)) == 4
    assert seen[0][0] == words.ctypes.data
    assert seen[0][2] == extra.ctypes.data
    loss_sum, _ = model.evaluate(parameters, records)
    assert loss_sum == pytest.approx(model.gradient(parameters, records, KEY)[0])


def test_records_are_evaluated_in_parts_with_their_own_elements(monkeypatch):
    monkeypatch.setattr(st, "_EVALUATED", 2)
    bag = torch.nn.EmbeddingBag(10, 2, include_last_offset=True)
    model = st.Model(bag, LOSS, inputs="words")
    words = (np.array([1, 2, 3, 4, 9]), np.array([0, 2, 2, 4, 5]))
    records = {"words": words, "label": np.array([0, 1, 1, 0])}
    parameters = read_only(model)
    assert model.evaluate(parameters, records)[0] == pytest.approx(
        model.gradient(parameters, records, KEY)[0], rel=1e-6
    )


def test_a_column_that_is_missing_or_text_is_refused_by_name():
    model = st.Model(torch.nn.Linear(6, 2), LOSS, inputs="text")
    parameters = read_only(model)
    with pytest.raises(steadfast.InvalidError, match="no column `text`, only features, label"):
        model.gradient(parameters, batch(2), KEY)
    text = {"text": np.array(["a", "b"], object), "label": np.array([0, 1])}
    with pytest.raises(steadfast.InvalidError, match="`text` holds text or bytes"):
        model.gradient(parameters, text, KEY)


def test_a_module_that_does_not_take_values_and_offsets_is_told_of_types():
    records = {"words": (np.array([1.0, 2.0], np.float32), np.array([0, 1, 2])), "label": np.array([0, 1])}
    model = st.Model(torch.nn.Linear(1, 2), LOSS, inputs="words")
    parameters = read_only(model)
    told = "called with 2 arguments for the inputs words: .* `dataset.types`, such as { words = .float32.64.. }"
    for call in (lambda: model.gradient(parameters, records, KEY), lambda: model.evaluate(parameters, records)):
        with pytest.raises(steadfast.InvalidError, match=told):
            call()

    class Wrong(torch.nn.Linear):
        def forward(self, values, offsets):
            return len(5)

    # Another error of the module is its own.
    model = st.Model(Wrong(1, 2), LOSS, inputs="words")
    with pytest.raises(TypeError, match="has no len"):
        model.gradient(read_only(model), records, KEY)


@pytest.mark.parametrize(
    "transform, message",
    [
        (lambda batch, key: {name: it[::2] for name, it in batch.items()}, "2 values of `features` for 4"),
        (lambda batch, key: {**batch, "words": (np.arange(4), np.arange(4))}, "3 values of `words` for 4"),
        (lambda batch, key: None, "returned a NoneType; return a dict"),
    ],
)
def test_a_transform_returns_columns_of_all_records(transform, message):
    model = st.Model(torch.nn.Linear(6, 2), LOSS, transform=transform)
    with pytest.raises(steadfast.InvalidError, match=message):
        steadfast.model.transformed(model, batch(4), KEY, 4)


def test_a_transform_may_draw_from_the_global_random_states():
    def noisy(batch, key):
        return {**batch, "features": torch.rand(4, 6) + np.random.rand()}

    model = st.Model(torch.nn.Linear(6, 2), LOSS, transform=noisy)
    first, second = (steadfast.model.transformed(model, batch(4), KEY, 4) for _ in range(2))
    assert torch.equal(first["features"], second["features"])
    other = steadfast.model.transformed(model, batch(4), SimpleNamespace(seed=6), 4)
    assert not torch.equal(first["features"], other["features"])


def test_inputs_and_target_have_the_same_records():
    model = st.Model(torch.nn.Linear(6, 2), LOSS)
    records = {**batch(4), "label": np.zeros(3)}
    with pytest.raises(steadfast.InvalidError, match="`features` has 4 records, the target `label` 3"):
        model.gradient(read_only(model), records, KEY)


def test_a_target_with_fractions_is_not_cut_to_classes():
    model = st.Model(torch.nn.Linear(6, 2), LOSS)
    records = {**batch(4), "label": np.array([0.0, 1.0, 0.5, 1.0], np.float32)}
    with pytest.raises(steadfast.InvalidError, match="`label` has fractions"):
        model.gradient(read_only(model), records, KEY)
    model = st.Model(torch.nn.Linear(6, 2), LOSS, label=torch.int64)
    with pytest.raises(steadfast.InvalidError, match="`label` has fractions.*label=torch.float32"):
        model.gradient(read_only(model), records, KEY)


def test_low_precision_needs_master_weights():
    with pytest.raises(steadfast.InvalidError, match="`weight` is torch.bfloat16.*master_weights=True"):
        st.Model(torch.nn.Linear(6, 2, dtype=torch.bfloat16), LOSS)
    with pytest.raises(steadfast.InvalidError, match="`weight` is torch.float64"):
        st.Model(torch.nn.Linear(6, 2, dtype=torch.float64), LOSS, master_weights=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_keep_what_the_module_rounds(dtype):
    class Rounded(torch.nn.Linear):
        def forward(self, features):
            return super().forward(features.to(dtype)).float()

    net = Rounded(6, 2, dtype=dtype)
    model = st.Model(net, LOSS, master_weights=True)
    parameters = {name: np.array(it) for name, it in model.initialize(1).items()}
    assert {it.dtype for it in parameters.values()} == {np.dtype(np.float32)}
    parameters["weight"] += np.float32(1e-4) * np.abs(parameters["weight"])
    before = {name: it.copy() for name, it in parameters.items()}
    _, gradients = model.gradient(parameters, batch(5), KEY)
    assert all((parameters[name] == before[name]).all() for name in before)
    assert {it.dtype for it in gradients.values()} == {np.dtype(np.float32)}
    assert (net.weight.detach() == torch.tensor(before["weight"]).to(dtype)).all()


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    net = torch.nn.Linear(6, 2)
    for device, message in [("tpu", "`device` is `tpu`"), ("mps", 'use "cpu" or "cuda"')]:
        with pytest.raises(steadfast.InvalidError, match=message):
            st.Model(net, LOSS, device=device)
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(steadfast.InvalidError, match="finds 0 GPUs"):
        st.Model(net, LOSS, device="cuda")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with pytest.raises(steadfast.InvalidError, match="finds 0 GPUs"):
        steadfast.entry.build({"entry": "digits:build"}, 64, "cuda")
    monkeypatch.setenv("STEADFAST_DEVICE", "cuda:1")
    with pytest.raises(steadfast.InvalidError, match="`cuda:1`.*finds 0 GPUs"):
        st.Model(net, LOSS)
    st.Model(net, LOSS, device="cpu")


def test_the_device_of_the_job_is_that_of_the_model(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    model = steadfast.entry.build({"entry": "digits:build"}, 64, "cpu")
    assert model.device == torch.device("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_computes_the_same_bits_each_time():
    model = st.Model(normalized(), LOSS, buffers="mean", device="cuda")
    assert torch.cuda.get_device_name() in model.numerics()
    parameters, records = read_only(model), batch(8)

    def found():
        return {name: it.copy() for name, it in model.gradient(parameters, records, KEY)[1].items()}

    first = found()
    assert all((it == first[name]).all() for name, it in found().items())
    assert model.evaluate(parameters, records)[0] > 0


def test_memory_between_host_and_device_is_used_again_and_changes_no_result():
    net = normalized()
    model = st.Model(net, LOSS, buffers="mean")
    parameters, records = read_only(model), batch(8)
    loss, direct = model.gradient(parameters, records, KEY)
    direct = {name: it.copy() for name, it in direct.items()}
    model._crossing = st._Crossing(model.device, model._state())
    for _ in range(2):
        again, crossed = model.gradient(parameters, records, KEY)
        assert again == loss
        assert all((it == direct[name]).all() for name, it in crossed.items())
        place = crossed["0.weight"].ctypes.data
        assert model.gradient(parameters, records, KEY)[1]["0.weight"].ctypes.data == place


def test_a_loss_that_broadcasts_on_purpose_is_accepted():
    """Such as that of an ensemble, which compares each of its outputs with the label."""
    check = _loss.LossCheck(lambda output, label: torch.nn.functional.mse_loss(output, label[:, None]), "mean")
    check.check(check.sample(torch.rand(5, 3), torch.rand(5)))


def test_a_loss_is_checked_with_no_fewer_records_than_a_micro_batch_has():
    """A loss that takes no single record, such as one on `squeeze`, is that of two or more records."""

    def of_several(output, label):
        return torch.nn.functional.binary_cross_entropy_with_logits(output.squeeze(), label)

    net = torch.nn.Linear(6, 1)
    single = st.Model(net, of_several)
    with pytest.raises(steadfast.InvalidError, match="that of one record cannot.*`min_records=2`"):
        single.gradient(read_only(single), batch(8), KEY)
    for min_records in (2, 3):
        for records in (1 + min_records, 8, 40):
            several = st.Model(net, of_several, min_records=min_records)
            several.gradient(read_only(several), batch(records), KEY)
            several.evaluate(read_only(several), batch(records))
            # Two records in parts of two would be compared with themselves.
            several.gradient(read_only(several), batch(min_records), KEY)


@pytest.mark.parametrize("min_records", [2, 3, 7])
@pytest.mark.parametrize("loss", [lambda o, y: LOSS(o, y, weight=WEIGHTS), lambda o, y: LOSS(o, y, reduction="sum")])
def test_a_loss_of_several_records_is_checked_too(loss, min_records):
    model = st.Model(torch.nn.Linear(6, 2), loss, min_records=min_records)
    with pytest.raises(steadfast.InvalidError, match=f"every {min_records} of them|pass `reduction=.sum.`"):
        model.gradient(read_only(model), batch(8), KEY)
    model = st.Model(torch.nn.Linear(6, 2), LOSS, reduction="sum", min_records=min_records)
    with pytest.raises(steadfast.InvalidError, match='pass `reduction="mean"`'):
        model.gradient(read_only(model), batch(8), KEY)


class Frames(torch.nn.Module):
    """Returns log-probabilities as CTC takes them: 8 steps of time, records, classes."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 8 * 5)

    def forward(self, features):
        return self.layer(features).view(-1, 8, 5).transpose(0, 1).log_softmax(dim=2)


def ctc(output, label):
    lengths = torch.full((len(label),), 8)
    targets = (label.long() % 4 + 1)[:, None]
    return torch.nn.functional.ctc_loss(output, targets, lengths, torch.ones(len(label), dtype=torch.int64))


@pytest.mark.parametrize("records", [4, 8])
def test_a_dimension_that_has_the_size_of_a_micro_batch_by_chance_is_not_one_of_records(records):
    """The steps of time of CTC, or rows that all records share."""
    model = st.Model(Frames(), ctc)
    model.gradient(read_only(model), batch(records), KEY)
    model.evaluate(read_only(model), batch(records))

    class Shared(torch.nn.Linear):
        def forward(self, features):
            return super().forward(features), torch.arange(8.0)

    shared = st.Model(Shared(6, 2), lambda o, y: LOSS(o[0], y) + o[1].sum().square())
    shared.gradient(read_only(shared), batch(records), KEY)
    shared.evaluate(read_only(shared), batch(records))


def test_a_loss_that_draws_from_other_generators_is_neither_refused_nor_disturbed():
    """The states of Python's and NumPy's generators are as if nothing had been checked."""
    for drawn in (random.random, np.random.rand):
        # It changes its values too seldom to be noticed by them.
        def noisy(output, label, drawn=drawn):
            return LOSS(output, label) + (0.5 if drawn() < 0.02 else 0.0)

        def after(model, checked):
            if not checked:
                model._loss_check.sample = lambda output, label: None
            found = [model.gradient(read_only(model), batch(8), SimpleNamespace(seed=seed))[0] for seed in range(192)]
            return found, random.random(), np.random.rand(), torch.rand(1).item()

        net = torch.nn.Linear(6, 2)
        assert after(st.Model(net, noisy), True) == after(st.Model(net, noisy), False)


def test_a_loss_may_change_its_output_and_its_labels():
    def in_place(output, label):
        label.sub_(1)
        return torch.nn.functional.mse_loss(output.mul_(2).squeeze(1), label)

    net = torch.nn.Linear(6, 1)
    model = st.Model(net, in_place, label=torch.float32)
    parameters, records = read_only(model), batch(8)
    checked = [model.gradient(parameters, batch(8), KEY)[0], model.evaluate(parameters, batch(8))]
    model._loss_check.sample = lambda output, label: None
    assert [model.gradient(parameters, batch(8), KEY)[0], model.evaluate(parameters, batch(8))] == checked

    def wrong(output, label):
        total = output.sum()
        output.detach().zero_()
        return total

    # Of what is left in the output, any loss would be right.
    model = st.Model(net, wrong)
    with pytest.raises(steadfast.InvalidError, match='pass `reduction="sum"`'):
        model.gradient(parameters, records, KEY)
