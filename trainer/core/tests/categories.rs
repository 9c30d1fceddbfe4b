//! The models of categories, which are rows of tables.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use steadfast_common::ids::{Lane, Pass};
use steadfast_common::job::columns::{Column, ColumnSpec, Shape, Values};
use steadfast_common::job::dataset::Records;
use steadfast_common::job::job_file;
use steadfast_common::job::spec::ModelSpec;
use steadfast_common::tensor::layout::Layout;
use steadfast_common::tensor::table::Rows;
use steadfast_trainer_core::{
    Batch, BatchIds, Evaluation, Inputs, MicroBatch, Model, ModelError, Parameters, Purpose,
    Random, Registry, TableRows,
};

const KEY: MicroBatch = MicroBatch { seed: 3, pass: Pass(1), step: 5, lane: Lane(2) };

/// The keys of models of each kind, with each loss; some drop units.
const MODELS: [&str; 7] = [
    "kind = 'fm'\nclasses = 2\nfactors = 3",
    "kind = 'fm'\nfactors = 2",
    "kind = 'deepfm'\nclasses = 2\nfactors = 3\nhidden = [6, 4]\nactivation = 'tanh'",
    "kind = 'deepfm'\nfactors = 2\nhidden = [8]\nactivation = 'sigmoid'\ndropout = 0.3",
    "kind = 'wide-deep'\nclasses = 2\nfactors = 3\nhidden = [6, 4]\nactivation = 'tanh'",
    "kind = 'wide-deep'\nfactors = 1\nhidden = [8]\nactivation = 'sigmoid'\ndropout = 0.3",
    "kind = 'wide-deep'\nclasses = 2\nhidden = [5]\nactivation = 'sigmoid'",
];

fn spec(keys: &str) -> ModelSpec {
    let text = format!(
        "name = \"x\"\npasses = 1\n[dataset]\nsource = [\"x\"]\nformat = \"csv\"\nlabel = \"y\"\n\
         categories = [\"c\"]\n[model]\n{keys}"
    );
    job_file::parse(&text).unwrap().model
}

fn build(spec: &ModelSpec) -> Result<Box<dyn Model>, ModelError> {
    Registry::built_in().build(spec, Inputs { features: 2, columns: 2 })
}

fn model(keys: &str) -> Box<dyn Model> {
    build(&spec(keys)).unwrap()
}

fn column(name: &str, kind: &str, values: Vec<i64>, offsets: Vec<i64>) -> Column {
    let spec = ColumnSpec { name: name.to_owned(), kind: kind.parse().unwrap() };
    Column { values: Values::Int64(values), offsets, ..Column::new(&spec) }
}

/// Records of two numbers, one category, and a list of others; the label is whether both categories are even or
/// both odd, which no linear model can tell.
fn records(count: usize) -> Records {
    let mut random = Random::keyed(11, Purpose::Gradient, 0, 0, 0);
    let (mut features, mut labels) = (Vec::new(), Vec::new());
    let (mut one, mut list, mut ends) = (Vec::new(), Vec::new(), vec![0]);
    for index in 0..count {
        let mut draw = |below: f32| (below * random.uniform()) as i64;
        let (a, b) = (draw(4.0), draw(4.0));
        features.extend([draw(100.0) as f32 / 100.0, -0.5]);
        labels.push(f32::from(a % 2 == b % 2));
        one.push(a);
        // Some have a category twice, some have none besides.
        list.extend(std::iter::repeat_n(b, 1 + usize::from(index % 7 == 0)));
        ends.push(list.len() as i64);
    }
    let mut columns = vec![column("a", "int64", one, vec![]), column("b", "int64[]", list, ends)];
    // Those of the list count as 1 or, seldom, less.
    let weight = |index| if index % 5 == 0 { 0.75 } else { 1.0 };
    columns[1].weights = (0..columns[1].values.len()).map(weight).collect();
    Records { features, width: 2, labels, columns, ..Records::default() }
}

/// Initial parameters with irregular rows for a batch.
fn start(model: &dyn Model, batch: &Batch<'_>) -> Parameters {
    let mut parameters = Parameters::zeros(Arc::new(Layout::new(model.parameters())));
    model.initialize(1, &mut parameters).unwrap();
    let tables = parameters.layout().tables().to_vec();
    let rows = |(index, ids): (usize, Vec<u64>)| {
        let (ids, width) = (BatchIds::new(&ids), tables[index].width);
        // The same row for the same id in any batch.
        let row = |id: &u64| {
            let mut random = Random::keyed(17, Purpose::Gradient, index as u64, *id, 0);
            (0..width).map(|_| 0.3 * random.normal()).collect::<Vec<_>>()
        };
        let values = ids.ids.as_slice().iter().flat_map(row).collect();
        ids.rows_of(&Rows::of(width, ids.ids.as_slice().to_vec(), values))
    };
    let ids = model.ids(batch, None).unwrap();
    parameters.with_tables(ids.into_iter().enumerate().map(rows).collect())
}

fn gradient_of(model: &dyn Model, at: &Parameters, batch: &Batch<'_>) -> (f64, Parameters) {
    let zeros = at.tables().iter().map(TableRows::zeros).collect();
    let mut gradient = Parameters::zeros(at.layout().clone()).with_tables(zeros);
    let loss = model.gradient(at, batch, &KEY, &mut gradient).unwrap();
    (loss, gradient)
}

#[test]
fn gradients_agree_with_central_differences() {
    for keys in MODELS {
        let (model, records) = (model(keys), records(20));
        let batch = Batch::from(&records);
        let at = start(&*model, &batch);
        let (_, gradient) = gradient_of(&*model, &at, &batch);
        let check = |at: f32, found: f32, what: &str, loss_at: &dyn Fn(f32) -> f64| {
            let (above, below) = (at + 1e-3, at - 1e-3);
            let slope = (loss_at(above) - loss_at(below)) / f64::from(above - below);
            assert!((slope - f64::from(found)).abs() < 2e-2, "{keys}, {what}: {slope} {found}");
        };
        for index in 0..at.values().len() {
            check(at.values()[index], gradient.values()[index], "value", &|value| {
                let mut at = at.clone();
                at.values_mut()[index] = value;
                gradient_of(&*model, &at, &batch).0
            });
        }
        for (table, found) in gradient.tables().iter().enumerate() {
            for (index, slope) in found.rows.values().iter().enumerate() {
                check(at.table(table).rows.values()[index], *slope, "row", &|value| {
                    let mut at = at.clone();
                    at.table_mut(table).rows.values_mut()[index] = value;
                    gradient_of(&*model, &at, &batch).0
                });
            }
        }
    }
}

fn evaluate(model: &dyn Model, records: &Records) -> Evaluation {
    let batch = Batch::from(records);
    model.evaluate(&start(model, &batch), &batch).unwrap()
}

#[test]
fn a_list_of_one_category_is_that_category() {
    for keys in MODELS {
        let model = model(keys);
        let plain = records(20);
        let mut lists = plain.clone();
        let one = &plain.columns[0];
        lists.columns[0].offsets = (0..=one.len() as i64).collect();
        lists.columns[0].shape = Shape::List;
        assert_eq!(evaluate(&*model, &lists), evaluate(&*model, &plain), "{keys}");
    }
}

/// Gradients add up over records: each has its own part in the rows of its categories, of lists with none, one or
/// several.
#[test]
fn the_gradient_of_records_is_the_sum_of_that_of_each() {
    for keys in MODELS.into_iter().filter(|keys| !keys.contains("dropout")) {
        let (model, mut records) = (model(keys), records(15));
        let lists = &mut records.columns[1];
        // The last record has no category there.
        let end = lists.offsets[14];
        lists.offsets[15] = end;
        let Values::Int64(values) = &mut lists.values else { unreachable!() };
        values.truncate(end as usize);
        lists.weights.truncate(end as usize);
        let batch = Batch::from(&records);
        let (loss, whole) = gradient_of(&*model, &start(&*model, &batch), &batch);
        let (mut loss_sum, mut sum) = (0.0, whole.clone());
        sum.clear();
        for record in 0..15 {
            let one = records.select(&[record]);
            let batch = Batch::from(&one);
            let (loss, gradient) = gradient_of(&*model, &start(&*model, &batch), &batch);
            loss_sum += loss;
            let values = sum.values_mut().iter_mut().zip(gradient.values());
            values.for_each(|(sum, value)| *sum += value);
            for (index, table) in gradient.tables().iter().enumerate() {
                let rows = &mut sum.table_mut(index).rows;
                for (place, id) in table.rows.ids().iter().enumerate() {
                    let found = rows.ids().binary_search(id).unwrap();
                    let row = rows.row_mut(found).iter_mut().zip(table.rows.row(place));
                    row.for_each(|(sum, value)| *sum += value);
                }
            }
        }
        assert!((loss - loss_sum).abs() < 1e-4, "{keys}");
        let all = |it: &Parameters| {
            let rows = it.tables().iter().flat_map(|table| table.rows.values().to_vec());
            it.values().iter().copied().chain(rows).collect::<Vec<_>>()
        };
        let close = all(&whole).into_iter().zip(all(&sum)).all(|(a, b)| (a - b).abs() < 1e-4);
        assert!(close, "{keys}");
    }
}

#[test]
fn dropout_depends_on_the_key_alone() {
    for keys in MODELS.into_iter().filter(|keys| keys.contains("dropout")) {
        let (model, records) = (model(keys), records(20));
        let batch = Batch::from(&records);
        let at = start(&*model, &batch);
        let (loss, gradient) = gradient_of(&*model, &at, &batch);
        assert_eq!(gradient_of(&*model, &at, &batch), (loss, gradient), "{keys}");
        let zeros = at.tables().iter().map(TableRows::zeros).collect();
        let mut other = Parameters::zeros(at.layout().clone()).with_tables(zeros);
        let key = MicroBatch { step: 6, ..KEY };
        assert_ne!(model.gradient(&at, &batch, &key, &mut other), Ok(loss), "{keys}");
        assert_ne!(evaluate(&*model, &records).loss_sum, loss, "{keys}");
    }
}

#[test]
fn records_that_do_not_fit_are_refused_not_computed() {
    for keys in MODELS.into_iter().filter(|keys| keys.contains("deep")) {
        let model = model(keys);
        let mut bad = records(3);
        bad.columns.pop();
        let found = model.check(&Batch::from(&bad));
        assert_eq!(found, Err(ModelError::Columns { expected: 2, found: 1 }), "{keys}");
        let mut bad = records(3);
        bad.features[2] = f32::NAN;
        let found = model.check(&Batch::from(&bad));
        assert_eq!(found, Err(ModelError::BadFeature { record: 1, feature: 0 }), "{keys}");
        let mut bad = records(3);
        bad.labels[1] = f32::INFINITY;
        assert!(model.check(&Batch::from(&bad)).is_err(), "{keys}");
    }
}

#[test]
fn every_error_of_a_spec_is_named() {
    let valid = spec("kind = 'deepfm'\nhidden = [4]");
    for kind in ["deepfm", "wide-deep"] {
        let valid = ModelSpec { kind: kind.to_owned(), ..valid.clone() };
        let errors = |spec: ModelSpec| match build(&spec).err() {
            Some(ModelError::BadSpec { errors }) => errors,
            other => panic!("expected errors, found {other:?}"),
        };
        let found = errors(ModelSpec { classes: Some(3), ..valid.clone() });
        assert_eq!(
            found,
            [format!(
                "`{kind}` tells two classes apart (`model.classes = 2`), or predicts a number"
            )]
        );
        let found = errors(ModelSpec { factors: Some(0), ..valid.clone() });
        assert_eq!(found, ["`model.factors` must be from 1 to 4095"]);
        let found = errors(ModelSpec { hidden: vec![], dropout: 1.0, ..valid });
        let expected = format!("`{kind}` requires `model.hidden`, for example [64, 32]");
        assert_eq!((found.len(), &found[1]), (2, &expected));
    }
}

#[test]
fn descent_learns_what_only_pairs_of_categories_tell() {
    for keys in [
        "kind = 'fm'\nclasses = 2\nfactors = 4",
        "kind = 'deepfm'\nclasses = 2\nfactors = 4\nhidden = [8]",
        "kind = 'wide-deep'\nclasses = 2\nfactors = 4\nhidden = [16]",
    ] {
        assert!(0.95 < accuracy_after_descent(keys), "{keys}");
    }
}

fn accuracy_after_descent(keys: &str) -> f64 {
    let (model, records) = (model(keys), records(200));
    let batch = Batch::from(&records);
    let mut at = start(&*model, &batch);
    for _ in 0..400 {
        let (_, gradient) = gradient_of(&*model, &at, &batch);
        let descend = |values: &mut [f32], gradient: &[f32]| {
            values.iter_mut().zip(gradient).for_each(|(value, slope)| *value -= 0.005 * slope);
        };
        descend(at.values_mut(), gradient.values());
        for (table, gradient) in gradient.tables().iter().enumerate() {
            descend(at.table_mut(table).rows.values_mut(), gradient.rows.values());
        }
    }
    model.evaluate(&at, &batch).unwrap().metric(&model.metric()).unwrap()
}

#[test]
fn no_record_has_no_ids_and_adds_nothing() {
    for keys in MODELS {
        let (model, records) = (model(keys), records(0));
        let batch = Batch::from(&records);
        let at = start(&*model, &batch);
        let (loss, gradient) = gradient_of(&*model, &at, &batch);
        assert_eq!((loss, gradient.table(0).rows.len()), (0.0, 0));
    }
}
