//! Properties of every built-in model, tested through the public interface.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use steadfast_common::ids::{Lane, Pass};
use steadfast_common::job::dataset::Records;
use steadfast_common::job::spec::{Activation, ModelSpec};
use steadfast_common::tensor::compression::Codec;
use steadfast_common::tensor::lane_tree::{LaneSums, LaneTree};
use steadfast_common::tensor::layout::Layout;
use steadfast_trainer_core::{
    Batch, Inputs, LaneBatches, MicroBatch, Model, ModelError, Parameters, Purpose, Random,
    Registry,
};

const KEY: MicroBatch = MicroBatch { seed: 3, pass: Pass(1), step: 5, lane: Lane(2) };
const FEATURES: usize = 4;

fn spec(kind: &str) -> ModelSpec {
    ModelSpec {
        factors: None,
        kind: kind.into(),
        classes: None,
        hidden: vec![],
        activation: Activation::Relu,
        dropout: 0.0,
        options: Default::default(),
        entry: None,
        script: None,
        device: None,
        min_records: None,
        class_weights: vec![],
    }
}

fn mlp(activation: Activation, classes: Option<usize>, dropout: f32) -> ModelSpec {
    ModelSpec { classes, hidden: vec![7, 6], activation, dropout, ..spec("mlp") }
}

fn softmax() -> ModelSpec {
    ModelSpec { classes: Some(3), ..spec("softmax") }
}

fn every_model() -> Vec<ModelSpec> {
    let mut specs = vec![spec("linear"), softmax()];
    for activation in [Activation::Relu, Activation::Tanh, Activation::Sigmoid] {
        specs.push(mlp(activation, Some(3), 0.0));
        specs.push(mlp(activation, Some(3), 0.4));
        specs.push(mlp(activation, None, 0.4));
    }
    specs
}

fn build(spec: &ModelSpec) -> Result<Box<dyn Model>, ModelError> {
    Registry::built_in().build(spec, Inputs { features: FEATURES, columns: 0 })
}

fn start(model: &dyn Model, seed: u64) -> Parameters {
    let mut parameters = Parameters::zeros(Arc::new(Layout::new(model.parameters())));
    model.initialize(seed, &mut parameters).unwrap();
    parameters
}

/// Records whose label is a function of the features: a class that models can learn.
fn records(count: usize) -> Records {
    let mut random = Random::keyed(11, Purpose::Gradient, 0, 0, 0);
    let mut records = Records { width: FEATURES, ..Records::default() };
    for _ in 0..count {
        let features = [(); FEATURES].map(|()| 2.0 * random.uniform() - 1.0);
        let class = if features[0] > 0.3 { 2.0 } else { f32::from(features[1] > features[2]) };
        records.features.extend(features);
        records.labels.push(class);
    }
    records
}

fn gradient_of(model: &dyn Model, at: &Parameters, key: &MicroBatch) -> (f64, Parameters) {
    let mut gradient = Parameters::zeros(at.layout().clone());
    let loss = model.gradient(at, &Batch::from(&records(9)), key, &mut gradient).unwrap();
    (loss, gradient)
}

#[test]
fn gradients_agree_with_central_differences() {
    for spec in every_model() {
        let model = build(&spec).unwrap();
        let mut parameters = start(&*model, 1);
        // Start where no ReLU is near its kink; with zero biases, a unit behind dead ones is.
        let mut random = Random::keyed(17, Purpose::Gradient, 0, 0, 0);
        parameters.values_mut().iter_mut().for_each(|value| *value += 0.2 * random.normal());
        let (_, gradient) = gradient_of(&*model, &parameters, &KEY);
        let scale = gradient.values().iter().fold(0.0_f32, |most, it| most.max(it.abs()));
        for index in 0..parameters.values().len() {
            let at = parameters.values()[index];
            let mut loss_at = |value: f32| {
                parameters.values_mut()[index] = value;
                gradient_of(&*model, &parameters, &KEY).0
            };
            let (above, below) = (at + 1e-3, at - 1e-3);
            let slope = (loss_at(above) - loss_at(below)) / f64::from(above - below);
            parameters.values_mut()[index] = at;
            let error = (slope - f64::from(gradient.values()[index])).abs();
            assert!(error < 2e-3 * f64::from(scale), "{spec:?}, value {index}: {error}");
        }
    }
}

#[test]
fn the_same_inputs_give_the_same_bits() {
    for spec in every_model() {
        let (one, two) = (build(&spec).unwrap(), build(&spec).unwrap());
        assert_eq!(start(&*one, 1), start(&*two, 1));
        assert_ne!(start(&*one, 1), start(&*one, 2));
        let parameters = start(&*one, 1);
        let (loss, gradient) = gradient_of(&*one, &parameters, &KEY);
        let (loss_again, again) = gradient_of(&*two, &parameters, &KEY);
        assert_eq!(loss.to_bits(), loss_again.to_bits());
        let bits = |it: &Parameters| it.values().iter().map(|it| it.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&gradient), bits(&again));
    }
}

/// Gradients add up over records and over calls, so that a mean can be weighted by true counts.
#[test]
fn a_gradient_is_added_to_what_is_there() {
    for spec in every_model() {
        let model = build(&spec).unwrap();
        let parameters = start(&*model, 1);
        let (_, once) = gradient_of(&*model, &parameters, &KEY);
        let mut twice = once.clone();
        let records = records(9);
        model.gradient(&parameters, &Batch::from(&records), &KEY, &mut twice).unwrap();
        for (once, twice) in once.values().iter().zip(twice.values()) {
            assert!((2.0 * once - twice).abs() <= 1e-5 * once.abs().max(1.0));
        }
    }
}

/// Steps use memory of former steps: what it holds must not reach a gradient.
#[test]
fn a_fresh_gradient_does_not_depend_on_what_its_memory_holds() {
    for spec in every_model() {
        let model = build(&spec).unwrap();
        let parameters = start(&*model, 1);
        let (loss, expected) = gradient_of(&*model, &parameters, &KEY);
        let held = vec![f32::NAN; parameters.values().len()];
        let mut fresh = Parameters::new(parameters.layout().clone(), held);
        let batch = records(9);
        let found = model.fresh_gradient(&parameters, &Batch::from(&batch), &KEY, &mut fresh);
        assert_eq!(found.unwrap(), loss);
        assert_eq!(fresh.values(), expected.values());
        let none = records(0);
        let found = model.fresh_gradient(&parameters, &Batch::from(&none), &KEY, &mut fresh);
        assert_eq!(found.unwrap(), 0.0);
        assert!(fresh.values().iter().all(|value| *value == 0.0));
    }
}

/// I7: lanes that are computed together give the bits that they give one by one: for any numbers of records
/// (none, one, more than a panel of a product has) and layers that no tile divides.
#[test]
fn lanes_computed_together_give_the_bits_of_each_lane() {
    let wide = |classes, dropout| ModelSpec {
        hidden: vec![530, 67],
        ..mlp(Activation::Relu, classes, dropout)
    };
    let specs = [wide(Some(3), 0.0), wide(Some(3), 0.3), wide(None, 0.3)];
    let sizes: [&[usize]; 5] = [&[4, 4, 4, 4], &[1, 0, 7], &[0, 5], &[300, 1, 2, 16, 9], &[0, 0]];
    for (spec, sizes) in specs.iter().flat_map(|spec| sizes.map(|sizes| (spec, sizes))) {
        let model = build(spec).unwrap();
        let at = start(model.as_ref(), 5);
        let tree = LaneTree::new(sizes.len() as u32);
        let of = |count: &usize| if *count == 0 { Records::default() } else { records(*count) };
        let all: Vec<Records> = sizes.iter().map(of).collect();
        let keys = tree.root().lanes().map(|lane| MicroBatch { lane, ..KEY });
        let lanes: Vec<_> = keys.zip(all.iter().map(Batch::from)).collect();

        let mut sums = LaneSums::new(tree);
        for (key, batch) in &lanes {
            let mut gradient = Parameters::zeros(at.layout().clone());
            let loss = model.fresh_gradient(&at, batch, key, &mut gradient).unwrap();
            let part = (!batch.is_empty()).then(|| (loss, gradient.into_values()));
            sums.put(tree.leaf(key.lane), part, |left, right| {
                left.0 += right.0;
                Codec::Plain.add(&mut left.1, &right.1);
            });
        }
        let zeros = || (0.0, vec![0.0; at.layout().len()]);
        let (loss, wanted) = sums.take_whole().unwrap_or_else(zeros);

        let mut together = at.clone();
        let batches = LaneBatches::new(tree, lanes);
        let found = model.gradient_of_lanes(&at, &batches, &mut together).unwrap();
        assert_eq!(found.map(f64::to_bits), Some(loss.to_bits()), "{spec:?} {sizes:?}");
        let bits = |values: &[f32]| values.iter().map(|it| it.to_bits()).collect::<Vec<_>>();
        assert!(bits(together.values()) == bits(&wanted), "{spec:?} {sizes:?}");
    }
}

/// A sum that would hide it, since sums of lanes saturate, is not made.
#[test]
fn a_lane_whose_gradient_is_not_finite_is_an_error() {
    let model = build(&mlp(Activation::Relu, None, 0.0)).unwrap();
    let at = start(model.as_ref(), 5);
    let fine = records(3);
    // The squared loss of these fits into 64 bits, and their gradient not into 32.
    let far = Records { labels: vec![3e38; 3], ..records(3) };
    let keys = [0, 1].map(|lane| MicroBatch { lane: Lane(lane), ..KEY });
    let lanes = keys.into_iter().zip([&fine, &far].map(Batch::from)).collect();
    let batches = LaneBatches::new(LaneTree::new(2), lanes);
    let found = model.gradient_of_lanes(&at, &batches, &mut at.clone());
    assert_eq!(found, Err(ModelError::NotFinite));
}

#[test]
fn dropout_depends_on_the_key_alone() {
    let model = build(&mlp(Activation::Tanh, Some(3), 0.5)).unwrap();
    let parameters = start(&*model, 1);
    let (loss, _) = gradient_of(&*model, &parameters, &KEY);
    let others = [
        MicroBatch { seed: 4, ..KEY },
        MicroBatch { pass: Pass(2), ..KEY },
        MicroBatch { step: 6, ..KEY },
        MicroBatch { lane: Lane(3), ..KEY },
    ];
    for other in others {
        assert_ne!(gradient_of(&*model, &parameters, &other).0, loss);
        assert_eq!(gradient_of(&*model, &parameters, &KEY).0, loss);
    }
}

#[test]
fn evaluation_drops_no_unit() {
    let parameters = start(&*build(&mlp(Activation::Relu, Some(3), 0.0)).unwrap(), 1);
    let evaluate = |dropout: f32| {
        let model = build(&mlp(Activation::Relu, Some(3), dropout)).unwrap();
        model.evaluate(&parameters, &Batch::from(&records(9))).unwrap()
    };
    assert_eq!(evaluate(0.5), evaluate(0.0));
    let model = build(&mlp(Activation::Relu, Some(3), 0.0)).unwrap();
    assert_eq!(evaluate(0.5).loss_sum, gradient_of(&*model, &parameters, &KEY).0);
}

#[test]
fn plain_descent_lowers_the_loss_of_every_model() {
    for spec in every_model() {
        let model = build(&spec).unwrap();
        let mut parameters = start(&*model, 1);
        let records = records(64);
        let batch = Batch::from(&records);
        let before = model.evaluate(&parameters, &batch).unwrap();
        let mut gradient = Parameters::zeros(parameters.layout().clone());
        for step in 0..600 {
            gradient.clear();
            let key = MicroBatch { step, ..KEY };
            model.gradient(&parameters, &batch, &key, &mut gradient).unwrap();
            for (value, slope) in parameters.values_mut().iter_mut().zip(gradient.values()) {
                *value -= 0.3 / 64.0 * slope;
            }
        }
        let after = model.evaluate(&parameters, &batch).unwrap();
        assert!(after.loss_sum < 0.9 * before.loss_sum, "{spec:?}: {before:?} to {after:?}");
        assert_eq!(after.records, 64);
        let better = match model.metric().name {
            "accuracy" => after.metric_sum > before.metric_sum || spec.dropout > 0.0,
            _ => after.metric_sum < before.metric_sum,
        };
        assert!(better, "{spec:?}: {before:?} to {after:?}");
    }
}

#[test]
fn records_that_do_not_fit_are_refused_not_computed() {
    for spec in every_model() {
        let model = build(&spec).unwrap();
        let parameters = start(&*model, 1);
        let refuse = |records: &Records| {
            let batch = Batch::from(records);
            let mut gradient = Parameters::zeros(parameters.layout().clone());
            let error = model.gradient(&parameters, &batch, &KEY, &mut gradient).unwrap_err();
            assert_eq!(model.evaluate(&parameters, &batch), Err(error.clone()));
            error
        };
        let mut bad = records(3);
        bad.features[6] = f32::INFINITY;
        assert_eq!(refuse(&bad), ModelError::BadFeature { record: 1, feature: 2 });
        let labels = vec![0.0; 3];
        let narrow = Records { features: vec![0.0; 6], width: 2, labels, ..Records::default() };
        assert_eq!(refuse(&narrow), ModelError::Width { expected: FEATURES, found: 2 });
        let mut bad = records(3);
        bad.labels[2] = f32::INFINITY;
        let value = f32::INFINITY;
        let expected = match model.metric().name {
            "accuracy" => ModelError::BadLabel { record: 2, value, classes: 3 },
            _ => ModelError::LabelNotFinite { record: 2, value },
        };
        assert_eq!(refuse(&bad), expected);
    }
}

#[test]
fn diverged_parameters_are_an_error_for_every_model() {
    for spec in every_model() {
        let model = build(&spec).unwrap();
        let mut parameters = start(&*model, 1);
        parameters.values_mut().fill(f32::NAN);
        let result = model.evaluate(&parameters, &Batch::from(&records(3)));
        assert_eq!(result, Err(ModelError::NotFinite), "{spec:?}");
    }
}

#[test]
fn no_record_adds_nothing() {
    for spec in every_model() {
        let model = build(&spec).unwrap();
        let parameters = start(&*model, 1);
        let mut gradient = Parameters::zeros(parameters.layout().clone());
        let records = Records::default();
        let loss = model.gradient(&parameters, &Batch::from(&records), &KEY, &mut gradient);
        assert_eq!(loss, Ok(0.0));
        assert!(gradient.values().iter().all(|it| *it == 0.0));
    }
}

#[test]
fn parameters_are_named_and_shaped_as_in_pytorch() {
    let named = |spec: &ModelSpec| -> Vec<(String, Vec<usize>)> {
        build(spec).unwrap().parameters().into_iter().map(|it| (it.name, it.shape)).collect()
    };
    let softmax = [("weight".to_string(), vec![3, FEATURES]), ("bias".to_string(), vec![3])];
    assert_eq!(named(&self::softmax()), softmax);
    let mlp = named(&mlp(Activation::Relu, None, 0.0));
    assert_eq!(mlp.len(), 6);
    assert_eq!(mlp[0], ("layers.0.weight".to_string(), vec![7, FEATURES]));
    assert_eq!(mlp[5], ("layers.2.bias".to_string(), vec![1]));
}

#[test]
fn every_fault_of_a_model_is_named() {
    let errors = |spec: &ModelSpec| match build(spec).err() {
        Some(ModelError::BadSpec { errors }) => errors,
        other => panic!("expected errors, found {other:?}"),
    };
    assert_eq!(errors(&spec("softmax")), ["`softmax` requires `model.classes`"]);
    assert_eq!(errors(&ModelSpec { classes: Some(1), ..spec("softmax") }).len(), 1);
    assert_eq!(errors(&ModelSpec { classes: Some(3), dropout: 0.5, ..spec("linear") }).len(), 2);
    assert_eq!(errors(&ModelSpec { dropout: f32::NAN, ..spec("mlp") }).len(), 2);
    assert_eq!(errors(&ModelSpec { hidden: vec![8, 0], dropout: 1.0, ..spec("mlp") }).len(), 2);
    let options = [("width".to_string(), 3.into())].into();
    let errors = errors(&ModelSpec { options, ..softmax() });
    assert_eq!(errors, ["`model.options` does not apply to `softmax`; remove it"]);
}

#[test]
fn an_unknown_model_is_answered_with_the_known_ones() {
    let message = build(&spec("forest")).err().unwrap().to_string();
    assert_eq!(
        message,
        "there is no model `forest`; known are deepfm, fm, linear, mlp, softmax, wide-deep"
    );
}
