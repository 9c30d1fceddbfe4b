//! The factorization machine, whose categories are rows of a table.

use std::sync::Arc;

use steadfast_common::columns::{Column, ColumnSpec, Values};
use steadfast_common::dataset::Records;
use steadfast_common::ids::{Lane, Pass};
use steadfast_common::job_file;
use steadfast_common::layout::Layout;
use steadfast_common::table::Rows;
use steadfast_trainer_core::{
    Batch, BatchIds, Inputs, MicroBatch, Model, Parameters, Purpose, Random, Registry, TableRows,
};

const KEY: MicroBatch = MicroBatch { seed: 3, pass: Pass(1), step: 5, lane: Lane(2) };

fn model(keys: &str, numbers: usize) -> Box<dyn Model> {
    let text = format!(
        "name = \"x\"\npasses = 1\n[dataset]\nsource = [\"x\"]\nformat = \"csv\"\nlabel = \"y\"\n\
         categories = [\"c\"]\n[model]\nkind = \"fm\"\n{keys}"
    );
    let spec = job_file::parse(&text).unwrap();
    let inputs = Inputs { features: numbers, columns: 2 };
    Registry::built_in().build(&spec.model, inputs).unwrap()
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
    let columns = vec![column("a", "int64", one, vec![]), column("b", "int64[]", list, ends)];
    Records { features, width: 2, labels, columns }
}

/// Initial parameters with irregular rows for a batch.
fn start(model: &dyn Model, batch: &Batch<'_>) -> Parameters {
    let mut parameters = Parameters::zeros(Arc::new(Layout::new(model.parameters())));
    model.initialize(1, &mut parameters).unwrap();
    let ids = BatchIds::new(&model.ids(batch, None).unwrap()[0]);
    let width = parameters.layout().tables()[0].width;
    let mut random = Random::keyed(17, Purpose::Gradient, 0, 0, 0);
    let values = (0..ids.ids.len() * width).map(|_| 0.3 * random.normal()).collect();
    let rows = Rows::of(width, ids.ids.clone(), values);
    parameters.with_tables(vec![ids.rows_of(&rows)])
}

fn gradient_of(model: &dyn Model, at: &Parameters, batch: &Batch<'_>) -> (f64, Parameters) {
    let zeros = at.tables().iter().map(TableRows::zeros).collect();
    let mut gradient = Parameters::zeros(at.layout().clone()).with_tables(zeros);
    let loss = model.gradient(at, batch, &KEY, &mut gradient).unwrap();
    (loss, gradient)
}

#[test]
fn gradients_agree_with_central_differences() {
    for keys in ["classes = 2\nfactors = 3", "factors = 2"] {
        let (model, records) = (model(keys, 2), records(20));
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
        let found = gradient.table(0).rows.values();
        for (index, slope) in found.iter().enumerate() {
            check(at.table(0).rows.values()[index], *slope, "row", &|value| {
                let mut at = at.clone();
                at.table_mut(0).rows.values_mut()[index] = value;
                gradient_of(&*model, &at, &batch).0
            });
        }
    }
}

#[test]
fn descent_learns_what_only_pairs_of_categories_tell() {
    let (model, records) = (model("classes = 2\nfactors = 4", 2), records(200));
    let batch = Batch::from(&records);
    let mut at = start(&*model, &batch);
    for _ in 0..400 {
        let (_, gradient) = gradient_of(&*model, &at, &batch);
        let descend = |values: &mut [f32], gradient: &[f32]| {
            values.iter_mut().zip(gradient).for_each(|(value, slope)| *value -= 0.005 * slope);
        };
        descend(at.values_mut(), gradient.values());
        descend(at.table_mut(0).rows.values_mut(), gradient.table(0).rows.values());
    }
    let evaluation = model.evaluate(&at, &batch).unwrap();
    let accuracy = evaluation.metric(&model.metric()).unwrap();
    assert!(0.95 < accuracy, "{accuracy}");
}

#[test]
fn no_record_has_no_ids_and_adds_nothing() {
    let (model, records) = (model("factors = 2", 2), records(0));
    let batch = Batch::from(&records);
    let at = start(&*model, &batch);
    let (loss, gradient) = gradient_of(&*model, &at, &batch);
    assert_eq!((loss, gradient.table(0).rows.len()), (0.0, 0));
}
