//! Checks a job spec, except the optimizer and the learning rate: invalid values, and values that would
//! silently be ignored.

use std::collections::BTreeSet;

use crate::job::models::{self, BuiltIn, Inputs, PYTHON};
use crate::job::optimizer_errors;
use crate::job::spec::{
    DataFormat, DatasetSpec, DeltaMode, EvaluationSpec, Header, JobSpec, Keep, LANES_MAX, Mode,
    Monitor, PlateauSpec, StartSpec, TableSpec, Transform,
};
use crate::tensor::compression::{Codec, Compression};

/// An error in the values of a job file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecError {
    /// The keys that the error depends on; the first is that of the value to change.
    pub keys: Vec<String>,
    /// A message that names the keys.
    pub text: String,
}

impl SpecError {
    pub(crate) fn new(keys: &[&str], text: impl Into<String>) -> Self {
        Self { keys: keys.iter().map(|key| (*key).to_owned()).collect(), text: text.into() }
    }
}

/// Returns the error of an invalid name of a job; `None` if the name is valid.
pub(crate) fn name_error(name: &str) -> Option<SpecError> {
    let allowed = |it: char| it.is_ascii_alphanumeric() || "-_.".contains(it);
    let is_valid = (1..=100).contains(&name.len()) && name.chars().all(allowed);
    (!is_valid || name.starts_with('.')).then(|| {
        SpecError::new(
            &["name"],
            format!(
                "`name` is `{name}`; use 1 to 100 letters, digits, `-`, `_` or `.`, no leading `.`"
            ),
        )
    })
}

/// Returns the errors of the settings of one table.
fn table_errors(name: &str, table: &TableSpec) -> Vec<SpecError> {
    let key = format!("tables.{name}");
    let mut errors = Vec::new();
    let mut error = |text: String| errors.push(SpecError::new(&[&key], text));
    let optimizer = table.optimizer.iter().flat_map(optimizer_errors::optimizer);
    let rate = table.learning_rate.iter().flat_map(optimizer_errors::learning_rate);
    for SpecError { text, .. } in optimizer.chain(rate) {
        let text = text.replace("`optimizer.", &format!("`{key}.optimizer."));
        error(text.replace("`learning_rate.", &format!("`{key}.learning_rate.")));
    }
    for (clip, value) in table.optimizer.iter().flat_map(|optimizer| {
        [("clip_value", optimizer.clip_value), ("clip_norm", optimizer.clip_norm)]
    }) {
        if value.is_some() {
            error(format!(
                "`{key}.optimizer.{clip}` does not apply: `optimizer.{clip}` clips all gradients"
            ));
        }
    }
    if table.optimizer.as_ref().is_some_and(|optimizer| !optimizer.groups.is_empty()) {
        error(format!(
            "`{key}.optimizer.groups` does not apply: a table is one parameter; remove it"
        ));
    }
    if table.admit_after == 0 {
        error(format!("`{key}.admit_after` must be at least 1"));
    }
    if table.expire_after == Some(0) {
        error(format!("`{key}.expire_after` must be at least 1"));
    }
    errors
}

/// Returns the errors of how evaluations reduce the learning rate.
fn plateau_errors(plateau: &PlateauSpec) -> Vec<String> {
    let PlateauSpec { factor, patience, min_delta, min_rate, .. } = plateau;
    let mut errors = Vec::new();
    let mut check = |key: &str, is_valid: bool, must: &str| {
        if !is_valid {
            errors.push(format!("`evaluation.reduce_on_plateau.{key}` must {must}"));
        }
    };
    check("factor", 0.0 < *factor && *factor < 1.0, "lie in 0 < … < 1");
    check("patience", 0 < *patience, "be at least 1");
    let is_delta = min_delta.is_none_or(|it| it.is_finite() && 0.0 <= it);
    check("min_delta", is_delta, "be finite and at least 0");
    let is_rate = min_rate.is_none_or(|it| it.is_finite() && 0.0 <= it);
    check("min_rate", is_rate, "be finite and at least 0");
    if plateau.min_delta_mode == DeltaMode::Relative && min_delta.is_none() {
        let text = "`evaluation.reduce_on_plateau.min_delta_mode` applies only with its `min_delta`; \
                    remove it";
        errors.push(text.to_owned());
    }
    errors
}

impl JobSpec {
    /// Returns all errors, as messages that name the keys.
    pub fn errors(&self) -> Vec<String> {
        self.all_errors().into_iter().map(|error| error.text).collect()
    }

    pub(crate) fn all_errors(&self) -> Vec<SpecError> {
        let mut errors = Vec::new();
        match self.model.has_closures() {
            true => self.closure_errors(&mut errors),
            false => {
                self.general_errors(&mut errors);
                self.dataset_errors(&mut errors);
            }
        }
        self.model_errors(&mut errors);
        let start = self.start.iter().flat_map(StartSpec::errors);
        errors.extend(start.map(|(key, text)| SpecError::new(&[key], text)));
        self.interval_errors(&mut errors);
        self.drop_last_errors(&mut errors);
        self.course_errors(&mut errors);
        self.gradient_errors(&mut errors);
        errors.extend(optimizer_errors::optimizer(&self.optimizer));
        errors.extend(optimizer_errors::learning_rate(&self.learning_rate));
        errors.extend(self.average.iter().flat_map(optimizer_errors::average));
        for (name, table) in &self.tables {
            errors.extend(table_errors(name, table));
        }
        errors
    }

    /// Adds the errors of a job whose gradients come from closures.
    fn closure_errors(&self, errors: &mut Vec<SpecError>) {
        errors.extend(name_error(&self.name));
        let mut error = |key: &str, is_wrong: bool, text: &str| {
            if is_wrong {
                errors.push(SpecError::new(&[key, "model.kind"], text));
            }
        };
        error(
            "mode",
            self.mode == Mode::Sync,
            "closures are not divided into steps: a model with `kind = \"closures\"` needs `mode = \"async\"`",
        );
        let ends = self.passes.is_some() || self.steps.is_some();
        let key = if self.passes.is_some() { "passes" } else { "steps" };
        error(
            key,
            ends,
            "a job of closures ends when its program ends it; remove `passes` and `steps`",
        );
        error(
            "dataset",
            self.dataset != DatasetSpec::default(),
            "a job of closures has no dataset: its program gives each closure its data; remove `[dataset]`",
        );
        error(
            "gradients.compression",
            self.gradients.codec() != Codec::Plain,
            "the rounding errors of closures are not carried over to the next one; remove `gradients.compression`",
        );
        error(
            "evaluation.fraction",
            self.evaluation.has_records(),
            "a job of closures has no held-out records: evaluate in a closure; remove `[evaluation]`",
        );
    }

    fn general_errors(&self, errors: &mut Vec<SpecError>) {
        errors.extend(name_error(&self.name));
        match (self.mode, self.passes, self.steps) {
            (_, Some(_), _) if self.dataset.follow => errors.push(SpecError::new(
                &["passes", "dataset.follow"],
                "`passes` means nothing with `dataset.follow`, which trains on each file once; remove it",
            )),
            (_, None, None) if self.dataset.follow => {}
            (_, None, None) => {
                errors.push(SpecError::new(
                    &["passes", "steps"],
                    "neither `passes` nor `steps` is set; set one",
                ));
            }
            (_, Some(_), Some(_)) => {
                errors.push(SpecError::new(
                    &["passes", "steps"],
                    "`passes` and `steps` are mutually exclusive; remove one",
                ));
            }
            (Mode::Async, None, Some(_)) => errors.push(SpecError::new(
                &["steps", "mode"],
                match self.dataset.follow {
                    true => "`steps` needs mode = \"sync\"; an asynchronous stream ends when it is drained",
                    false => "`steps` needs mode = \"sync\"; an asynchronous job ends after `passes`",
                },
            )),
            (Mode::Sync | Mode::Async, ..) => {}
        }
        for (key, value) in [("passes", self.passes.map(u64::from)), ("steps", self.steps)] {
            if value == Some(0) {
                errors.push(SpecError::new(&[key], format!("`{key}` must be at least 1")));
            }
        }
    }

    /// Adds the errors of a dataset that is followed.
    fn stream_errors(&self, errors: &mut Vec<SpecError>) {
        let mut error = |key: &str, text: String| {
            errors.push(SpecError::new(&[key, "dataset.follow"], text));
        };
        for source in &self.dataset.source {
            if source.starts_with("http://") || source.starts_with("https://") {
                error(
                    "dataset.source",
                    format!(
                        "`dataset.follow` cannot list the files at `{source}`; use a directory or a bucket"
                    ),
                );
            } else if !source.contains(['*', '?']) {
                error(
                    "dataset.source",
                    format!(
                        "`dataset.follow` needs sources with `*` or `?`, such as `data/*.csv`; `{source}` has none"
                    ),
                );
            }
        }
        if self.sync.drop_last {
            let text = "`sync.drop_last` does not apply to a stream, which trains on each record once; remove it";
            error("sync.drop_last", text.to_owned());
        }
        if self.evaluation.has_records() {
            error(
                "evaluation.fraction",
                "a stream has no held-out records: `evaluation.fraction` must be 0 with `dataset.follow`, and \
                 `evaluation.source` absent"
                    .to_owned(),
            );
        }
        if self.dataset.format == DataFormat::Libsvm && !self.dataset.features.is_empty() {
            error(
                "dataset.features",
                "the largest index of a stream of `libsvm` files is not known; read `columns` or `categories`"
                    .to_owned(),
            );
        }
    }

    fn dataset_errors(&self, errors: &mut Vec<SpecError>) {
        let dataset = &self.dataset;
        if dataset.source.is_empty() {
            errors.push(SpecError::new(&["dataset.source"], "`dataset.source` names no file"));
        }
        if dataset.follow {
            self.stream_errors(errors);
        }
        self.column_errors(errors);
        self.cross_errors(errors);
        if !dataset.label.is_empty()
            && BTreeSet::from_iter(&dataset.features).contains(&dataset.label)
        {
            errors.push(SpecError::new(
                &["dataset.label", "dataset.features"],
                format!("`dataset.label` `{}` is also a feature", dataset.label),
            ));
        }
        self.weight_errors(errors);
        self.class_errors(errors);
        if dataset.categories.contains(&dataset.label) {
            errors.push(SpecError::new(
                &["dataset.label", "dataset.categories"],
                format!("`dataset.label` `{}` is also a category", dataset.label),
            ));
        }
        let has_both = !dataset.categories.is_empty() && !dataset.features.is_empty();
        if has_both && dataset.format == DataFormat::Libsvm {
            errors.push(SpecError::new(
                &["dataset.features", "dataset.categories"],
                "`dataset.features` and `dataset.categories` of LibSVM files are mutually exclusive; \
                 remove one",
            ));
        }
        if dataset.missing.is_some_and(|value| !value.is_finite()) {
            errors.push(SpecError::new(
                &["dataset.missing"],
                "`dataset.missing` must be a finite number",
            ));
        }
        if dataset.missing.is_some() && dataset.format == DataFormat::Libsvm {
            errors.push(SpecError::new(
                &["dataset.missing", "dataset.format"],
                "`dataset.missing` does not apply to LibSVM, where a missing feature is 0; remove it",
            ));
        }
        if !dataset.feature_scale.is_finite() || dataset.feature_scale == 0.0 {
            errors.push(SpecError::new(
                &["dataset.feature_scale"],
                "`dataset.feature_scale` must be a finite number other than 0",
            ));
        }
        if dataset.records_per_task == Some(0) {
            errors.push(SpecError::new(
                &["dataset.records_per_task"],
                "`dataset.records_per_task` must be at least 1",
            ));
        }
        let is_text = matches!(dataset.format, DataFormat::Csv | DataFormat::Tsv);
        if !is_text && dataset.header != Header::Present {
            errors.push(SpecError::new(
                &["dataset.header", "dataset.format"],
                "`dataset.header` applies to CSV and TSV only; remove it",
            ));
        }
        if !(0.0..=0.9).contains(&self.evaluation.fraction) {
            errors.push(SpecError::new(
                &["evaluation.fraction"],
                "`evaluation.fraction` must lie between 0 and 0.9",
            ));
        }
        if 0.0 < self.evaluation.fraction && !self.evaluation.source.is_empty() {
            errors.push(SpecError::new(
                &["evaluation.fraction", "evaluation.source"],
                "`evaluation.fraction` and `evaluation.source` are mutually exclusive; remove one",
            ));
        }
        let EvaluationSpec { every_passes, every_steps, .. } = &self.evaluation;
        let every = [("every_passes", every_passes.map(u64::from)), ("every_steps", *every_steps)];
        for (key, _) in every.into_iter().filter(|it| it.1 == Some(0)) {
            let key = format!("evaluation.{key}");
            errors.push(SpecError::new(&[&key], format!("`{key}` must be at least 1")));
        }
        if every_passes.is_some() && every_steps.is_some() {
            errors.push(SpecError::new(
                &["evaluation.every_passes", "evaluation.every_steps"],
                "`evaluation.every_passes` and `evaluation.every_steps` are mutually exclusive; remove one",
            ));
        }
        if every_steps.is_some() && self.mode == Mode::Async {
            errors.push(SpecError::new(
                &["evaluation.every_steps", "mode"],
                "`evaluation.every_steps` needs mode = \"sync\"; an asynchronous job is evaluated at its end only",
            ));
        }
    }

    /// Adds the errors of the weights of records.
    fn weight_errors(&self, errors: &mut Vec<SpecError>) {
        let dataset = &self.dataset;
        let Some(weight) = &dataset.weight else { return };
        let mut error = |key: &str, text: String| {
            errors.push(SpecError::new(&["dataset.weight", key], text));
        };
        if !dataset.columns.is_empty() {
            error(
                "dataset.columns",
                "`dataset.weight` applies to `dataset.features`; name the column in `dataset.columns`, and pass \
                 `weight` to the Python model"
                    .to_owned(),
            );
        }
        if dataset.format == DataFormat::Libsvm {
            let text =
                "`dataset.weight` does not apply to LibSVM, which has no such column; remove it";
            error("dataset.format", text.to_owned());
        }
        let others = [&dataset.features[..], &dataset.categories[..]].concat();
        if *weight == dataset.label || others.contains(weight) {
            let text =
                format!("`dataset.weight` `{weight}` is also the label, a feature or a category");
            error("dataset.features", text);
        }
    }

    /// Adds the errors of the names of classes.
    fn class_errors(&self, errors: &mut Vec<SpecError>) {
        let (names, model) = (&self.dataset.classes, &self.model);
        if names.is_empty() {
            return;
        }
        let mut error = |key: &str, text: String| {
            errors.push(SpecError::new(&["dataset.classes", key], text));
        };
        if !self.dataset.columns.is_empty() {
            let text = "`dataset.classes` are values of `dataset.label`, and there is none with `dataset.columns`; \
                        remove it";
            error("dataset.columns", text.to_owned());
        }
        let (count, distinct) = (names.len(), BTreeSet::from_iter(names).len());
        if distinct < count || count < 2 || names.iter().any(|name| name.trim() != name) {
            let text = "`dataset.classes` must have two or more different values, without spaces around them";
            error("dataset.label", text.to_owned());
        }
        match (BuiltIn::of(&model.kind), model.classes) {
            (Some(_), Some(classes)) if classes != count => error(
                "model.classes",
                format!("`dataset.classes` has {count} values, and `model.classes` is {classes}"),
            ),
            (Some(_), None) => error(
                "model.classes",
                format!(
                    "this model `{}` predicts a number, and `dataset.classes` names classes; remove it, or set \
                         `model.classes`",
                    model.kind
                ),
            ),
            (Some(_) | None, _) => {}
        }
    }

    /// Adds the error of leaving out records where there are no steps.
    fn drop_last_errors(&self, errors: &mut Vec<SpecError>) {
        if self.sync.drop_last && self.mode == Mode::Async {
            let text = "`sync.drop_last` needs mode = \"sync\"; remove it";
            errors.push(SpecError::new(&["sync.drop_last", "mode"], text));
        }
    }

    /// Adds the errors of what depends on evaluations.
    fn course_errors(&self, errors: &mut Vec<SpecError>) {
        let evaluation = &self.evaluation;
        let mut error = |keys: &[&str], text: &str| errors.push(SpecError::new(keys, text));
        let (by_patience, by_keep) = (evaluation.patience.is_some(), evaluation.keep == Keep::Best);
        let by_plateau = evaluation.reduce_on_plateau.is_some();
        let decisive =
            [("patience", by_patience), ("keep", by_keep), ("reduce_on_plateau", by_plateau)];
        for (key, _) in decisive.iter().filter(|it| it.1) {
            let key = format!("evaluation.{key}");
            if self.mode == Mode::Async {
                let text = format!(
                    "`{key}` needs mode = \"sync\"; an asynchronous job is evaluated at its end only"
                );
                error(&[&key, "mode"], &text);
            }
            if !evaluation.has_records() {
                let text = format!(
                    "`{key}` needs held-out records: set `evaluation.fraction` or `evaluation.source`"
                );
                error(&[&key, "evaluation.fraction"], &text);
            }
            if self.passes.is_none() && evaluation.every_steps.is_none() {
                let text = format!(
                    "`{key}` needs `passes`, which evaluations follow, or `evaluation.every_steps`"
                );
                error(&[&key, "passes"], &text);
            }
        }
        if evaluation.patience == Some(0) {
            error(&["evaluation.patience"], "`evaluation.patience` must be at least 1");
        }
        if evaluation.min_delta.is_some_and(|it| !it.is_finite() || it < 0.0) {
            let text = "`evaluation.min_delta` must be finite and at least 0";
            error(&["evaluation.min_delta"], text);
        }
        if evaluation.min_delta.is_some() && !by_patience {
            let text = "`evaluation.min_delta` applies only with `evaluation.patience`; remove it";
            error(&["evaluation.min_delta", "evaluation.patience"], text);
        }
        let by_metric = evaluation.monitor != Monitor::Loss;
        let metrics: &[&str] = match self.model.classes {
            None => &["rmse"],
            Some(2) => &["accuracy", "auc"],
            Some(_) => &["accuracy"],
        };
        if let Monitor::Named(name) = &evaluation.monitor
            && BuiltIn::of(&self.model.kind).is_some()
            && !metrics.contains(&name.as_str())
        {
            let kind = &self.model.kind;
            let text = format!(
                "`evaluation.monitor` is \"{name}\", and this model `{kind}` has the metrics: {}; name one of \
                 them, or \"loss\"",
                metrics.join(", ")
            );
            error(&["evaluation.monitor", "model.kind"], &text);
        }
        for text in evaluation.reduce_on_plateau.iter().flat_map(plateau_errors) {
            error(&["evaluation.reduce_on_plateau"], &text);
        }
        if by_metric && !evaluation.decides() {
            let text = "`evaluation.monitor` applies only with `evaluation.patience`, \
                        `evaluation.keep` or `evaluation.reduce_on_plateau`; remove it";
            error(&["evaluation.monitor"], text);
        }
        match (by_metric, evaluation.goal) {
            (true, None) => {
                let name = String::from(evaluation.monitor.clone());
                let text = format!(
                    "`evaluation.monitor` = \"{name}\" needs `evaluation.goal`: \"max\" for an accuracy, \"min\" for \
                     an error"
                );
                error(&["evaluation.goal", "evaluation.monitor"], &text);
            }
            (false, Some(_)) => {
                let text = "`evaluation.goal` applies to a metric as `evaluation.monitor` only: a loss is \
                            to fall; remove it";
                error(&["evaluation.goal", "evaluation.monitor"], text);
            }
            (true, Some(_)) | (false, None) => {}
        }
    }

    fn column_errors(&self, errors: &mut Vec<SpecError>) {
        let dataset = &self.dataset;
        if dataset.columns.is_empty() {
            if dataset.features.is_empty() && dataset.categories.is_empty() {
                let text = "`dataset.features` names no column; name the columns to compute with, or \
                            those for a Python model in `dataset.columns`";
                errors.push(SpecError::new(&["dataset.features"], text));
            }
            if dataset.label.is_empty() {
                let text = "`dataset.label` is missing; name the column to predict";
                errors.push(SpecError::new(&["dataset.label"], text));
            }
            if !dataset.types.is_empty() && dataset.categories.is_empty() {
                let text = "`dataset.types` applies to `dataset.columns` and `dataset.categories` \
                            only; remove it";
                errors.push(SpecError::new(&["dataset.types"], text));
            }
            return;
        }
        let others = [
            ("dataset.features", !dataset.features.is_empty()),
            ("dataset.label", !dataset.label.is_empty()),
            ("dataset.categories", !dataset.categories.is_empty()),
            ("dataset.missing", dataset.missing.is_some()),
            ("dataset.transform", dataset.transform != Transform::None),
            ("dataset.feature_scale", dataset.feature_scale != 1.0),
        ];
        for (key, _) in others.into_iter().filter(|(_, is_set)| *is_set) {
            let text = format!("`{key}` and `dataset.columns` are mutually exclusive; remove one");
            errors.push(SpecError::new(&[key, "dataset.columns"], text));
        }
        if BuiltIn::of(&self.model.kind).is_some() {
            errors.push(SpecError::new(
                &["dataset.columns", "model.kind"],
                format!(
                    "the model `{}` takes `dataset.features` and `dataset.label`, not \
                     `dataset.columns`",
                    self.model.kind
                ),
            ));
        }
    }

    /// Adds the errors of `dataset.crosses`. Does not check whether the columns that a cross combines exist, because
    /// that is known only from the files.
    fn cross_errors(&self, errors: &mut Vec<SpecError>) {
        let dataset = &self.dataset;
        let mut error = |keys: &[&str], text| errors.push(SpecError::new(keys, text));
        let has_columns = !dataset.categories.is_empty() || !dataset.columns.is_empty();
        if !dataset.crosses.is_empty() && !has_columns {
            let text = "`dataset.crosses` combines columns of `dataset.categories`, or of \
                        `dataset.columns`; name some"
                .to_owned();
            error(&["dataset.crosses", "dataset.categories"], text);
        }
        for (name, parts) in &dataset.crosses {
            if BTreeSet::from_iter(parts).len() != parts.len() || parts.len() < 2 {
                let text = format!("`dataset.crosses.{name}` needs two or more different columns");
                error(&["dataset.crosses"], text);
            }
        }
    }

    fn model_errors(&self, errors: &mut Vec<SpecError>) {
        let model = &self.model;
        let kind = model.kind.as_str();
        let built_in = BuiltIn::of(kind);
        let takes_categories = built_in.is_some_and(|it| it.inputs == Inputs::Categories);
        let has_categories = !self.dataset.categories.is_empty();
        let mut error = |key: &str, text: String| {
            errors.push(SpecError::new(&[key, "model.kind"], text));
        };
        if has_categories && !takes_categories && (built_in.is_some() || kind == PYTHON) {
            let others = models::names(|it| it.inputs == Inputs::Categories);
            let text = format!("`dataset.categories` does not apply to `{kind}`; choose {others}");
            error("dataset.categories", text);
        }
        if takes_categories && !has_categories && self.dataset.columns.is_empty() {
            let text = format!("`{kind}` requires `dataset.categories`");
            error("dataset.categories", text);
        }
        errors.extend(model.errors());
        self.python_errors(errors);
    }

    fn python_errors(&self, errors: &mut Vec<SpecError>) {
        let model = &self.model;
        if model.kind == PYTHON && model.entry.is_none() && model.script.is_none() {
            errors.push(SpecError::new(
                &["model.entry", "model.kind"],
                "`python` requires `model.entry`, for example \"digits:build\", or `model.script`",
            ));
        }
        if model.entry.as_ref().is_some_and(|entry| entry.starts_with("__main__:")) {
            errors.push(SpecError::new(
                &["model.entry"],
                "`model.entry` names `__main__`, the program or notebook that describes the job, and trainers are \
                 processes of their own: move the function to a file, for example digits.py with \"digits:build\" \
                 (in a notebook, a cell that begins with `%%writefile digits.py` writes one)",
            ));
        }
        let (is_python, closures) = (model.kind == PYTHON, model.has_closures());
        let of_python = [
            ("model.entry", &model.entry, is_python),
            ("model.script", &model.script, is_python || closures),
            ("model.device", &model.device, is_python),
        ];
        for (key, value, applies) in of_python {
            if value.is_some() && !applies {
                errors.push(SpecError::new(
                    &[key, "model.kind"],
                    format!("`{key}` does not apply to `{}`; remove it", model.kind),
                ));
            }
        }
        let is_device = |name: &String| {
            let (kind, index) = name.split_once(':').unwrap_or((name, "0"));
            matches!(kind, "cpu" | "cuda") && index.parse::<u16>().is_ok()
        };
        if let Some(device) = model.device.as_ref().filter(|name| !is_device(name)) {
            errors.push(SpecError::new(
                &["model.device"],
                format!("`model.device` is `{device}`; use \"cpu\" or \"cuda\", or \"cuda:1\" for a certain GPU"),
            ));
        }
    }

    fn gradient_errors(&self, errors: &mut Vec<SpecError>) {
        let sparse = self.gradients.compression == Compression::TopK;
        if sparse && self.mode == Mode::Sync {
            errors.push(SpecError::new(
                &["gradients.compression", "mode"],
                "`gradients.compression` `top_k` needs mode = \"async\"; use `bf16` or `int8`",
            ));
        }
        match self.gradients.keep {
            Some(_) if !sparse => {
                errors.push(SpecError::new(
                    &["gradients.keep", "gradients.compression"],
                    "`gradients.keep` applies only to `top_k`; remove it",
                ));
            }
            Some(keep) if !(0.0 < keep && keep <= 1.0) => {
                errors.push(SpecError::new(
                    &["gradients.keep", "gradients.compression"],
                    "`gradients.keep` must lie in 0 < … ≤ 1",
                ));
            }
            Some(_) | None => {}
        }
    }

    fn interval_errors(&self, errors: &mut Vec<SpecError>) {
        let mut at_least_one = |key: &str, value: u64| {
            if value == 0 {
                errors.push(SpecError::new(&[key], format!("`{key}` must be at least 1")));
            }
        };
        at_least_one("sync.lanes", u64::from(self.sync.lanes));
        at_least_one("sync.micro_batch", u64::from(self.sync.micro_batch));
        at_least_one("async.batch", u64::from(self.asynchronous.batch));
        at_least_one("model.min_records", u64::from(self.model.min_records()));
        at_least_one("async.push_every", u64::from(self.asynchronous.push_every));
        at_least_one("async.pull_every", u64::from(self.asynchronous.pull_every));
        at_least_one("tasks.deadline", self.tasks.deadline.as_millis() as u64);
        at_least_one("checkpoint.keep", u64::from(self.checkpoint.keep));
        at_least_one("checkpoint.every_steps", self.checkpoint.every_steps.unwrap_or(1));
        at_least_one(
            "checkpoint.every",
            self.checkpoint.every.map_or(1, |every| every.as_millis() as u64),
        );
        let (key, size) = match self.mode {
            Mode::Sync => ("sync.micro_batch", self.sync.micro_batch),
            Mode::Async => ("async.batch", self.asynchronous.batch),
        };
        // A size of zero is an error of its own.
        if size.max(1) < self.model.min_records() {
            errors.push(SpecError::new(
                &["model.min_records", key],
                format!("`model.min_records` must be at most `{key}`, which is {size}"),
            ));
        }
        if LANES_MAX < self.sync.lanes {
            errors.push(SpecError::new(
                &["sync.lanes"],
                format!("`sync.lanes` must be at most {LANES_MAX}"),
            ));
        }
        if self.mode == Mode::Async && self.checkpoint.every_steps.is_some() {
            errors.push(SpecError::new(
                &["checkpoint.every_steps", "mode"],
                "`checkpoint.every_steps` needs mode = \"sync\"; use `checkpoint.every`",
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::job::job_file;

    /// Returns the errors of a job file with these keys of `[dataset]` and `[model]`.
    fn errors(dataset: &str, model: &str) -> Vec<String> {
        let text = format!(
            "name = 'x'\npasses = 1\n[dataset]\nsource = ['x']\nformat = 'csv'\n{dataset}\n\
             [model]\n{model}"
        );
        job_file::parse(&text).err().map(|error| error.errors).unwrap_or_default()
    }

    const CATEGORIES: &str = "label = 'y'\ncategories = ['a', 'b']";

    #[test]
    fn models_of_categories_require_them_and_other_built_in_models_refuse_them() {
        for kind in ["fm", "deepfm", "wide-deep"] {
            let hidden = if kind == "fm" { "" } else { "hidden = [4]" };
            let model = format!("kind = '{kind}'\n{hidden}");
            assert_eq!(errors(CATEGORIES, &model), [""; 0]);
            let found = errors("label = 'y'\nfeatures = ['x']", &model);
            assert_eq!(found, [format!("`{kind}` requires `dataset.categories`")]);
            let found = errors(CATEGORIES, &format!("{model}\nclasses = 3"));
            assert_eq!(found.len(), 1, "{found:?}");
        }
        assert_eq!(
            errors(CATEGORIES, "kind = 'deepfm'"),
            ["`deepfm` requires `model.hidden`, for example [64, 32]"]
        );
        assert_eq!(
            errors(CATEGORIES, "kind = 'mlp'\nhidden = [4]"),
            ["`dataset.categories` does not apply to `mlp`; choose `fm`, `deepfm`, `wide-deep`"]
        );
        assert_eq!(errors(CATEGORIES, "kind = 'my-own'"), [""; 0]);
    }

    #[test]
    fn a_cross_combines_two_or_more_different_columns() {
        let fm = |dataset: &str| errors(dataset, "kind = 'fm'");
        let with = |crosses: &str| fm(&format!("{CATEGORIES}\ncrosses = {crosses}"));
        assert_eq!(with("{ c = ['a', 'b'], d = ['b', 'a'] }"), [""; 0]);
        for bad in ["{ c = [] }", "{ c = ['a'] }", "{ c = ['a', 'a'] }"] {
            let expected = "`dataset.crosses.c` needs two or more different columns";
            assert_eq!(with(bad), [expected]);
        }
        let found = errors(
            "label = 'y'\nfeatures = ['a', 'b']\ncrosses = { c = ['a', 'b'] }",
            "kind = 'linear'",
        );
        assert!(found[0].contains("`dataset.crosses` combines columns of"), "{found:?}");
    }

    #[test]
    fn the_program_that_describes_a_job_is_not_the_module_of_its_model() {
        let model = |entry: &str| format!("kind = 'python'\nentry = '{entry}'");
        let found = errors("columns = ['x']", &model("__main__:build"));
        assert!(found[0].contains("names `__main__`"), "{found:?}");
        assert_eq!(errors("columns = ['x']", &model("main:build")), [""; 0]);
    }

    #[test]
    fn weights_are_of_records_and_classes_that_there_are() {
        let features = "label = 'y'\nfeatures = ['x']";
        let softmax = |keys: &str| {
            errors(
                &format!("{features}\n{keys}"),
                "kind = 'softmax'\nclasses = 2\nclass_weights = [1, 0.5]",
            )
        };
        assert_eq!(softmax("weight = 'w'"), [""; 0]);
        for other in ["x", "y"] {
            let found = softmax(&format!("weight = '{other}'"));
            assert_eq!(
                found,
                [format!("`dataset.weight` `{other}` is also the label, a feature or a category")]
            );
        }
        let found = errors("columns = ['x']\nweight = 'x'", "kind = 'python'\nentry = 'a:b'");
        assert!(found[0].contains("name the column in `dataset.columns`"), "{found:?}");
        let of = |model: &str| errors(features, model);
        let found = of("kind = 'mlp'\nhidden = [2]\nclass_weights = [1, 1]");
        assert_eq!(found, ["`model.class_weights` does not apply to `mlp`; remove it"]);
        let found = of("kind = 'softmax'\nclasses = 3\nclass_weights = [1, 1]");
        assert_eq!(found, ["`model.class_weights` must have a number for each class"]);
        let found = of("kind = 'softmax'\nclasses = 2\nclass_weights = [1, -1]");
        assert_eq!(found, ["`model.class_weights` must be finite numbers from 0 on"]);
        assert!(!of("kind = 'my-own'\nclass_weights = [1]").is_empty());
    }

    #[test]
    fn a_metric_of_a_built_in_model_is_monitored_by_its_name_alone() {
        let evaluation = |name: &str| {
            let model = "kind = 'softmax'\nclasses = 2\n[evaluation]\nfraction = 0.1\npatience = 1\ngoal = 'max'";
            errors("label = 'y'\nfeatures = ['x']", &format!("{model}\nmonitor = '{name}'"))
        };
        for name in ["accuracy", "metric", "auc"] {
            assert_eq!(evaluation(name), [""; 0]);
        }
        let found = evaluation("acuracy");
        assert!(found[0].contains("has the metrics: accuracy, auc; name one"), "{found:?}");
    }

    #[test]
    fn named_classes_are_those_of_the_model() {
        let with = |classes: &str, model: &str| {
            errors(&format!("label = 'y'\nfeatures = ['x']\nclasses = {classes}"), model)
        };
        let softmax = "kind = 'softmax'\nclasses = 2";
        assert_eq!(with("['cat', 'dog']", softmax), [""; 0]);
        assert_eq!(with("['cat', 'dog']", "kind = 'my-own'"), [""; 0]);
        for bad in ["['cat']", "['a', 'a']", "['a', ' b']"] {
            let found = with(bad, "kind = 'my-own'");
            assert!(found.len() == 1 && found[0].contains("two or more different"), "{found:?}");
        }
        let found = with("['a', 'b', 'c']", softmax);
        assert_eq!(found, ["`dataset.classes` has 3 values, and `model.classes` is 2"]);
        let found = with("['a', 'b']", "kind = 'linear'");
        assert!(found[0].contains("this model `linear` predicts a number"), "{found:?}");
        let found =
            errors("columns = ['x']\nclasses = ['a', 'b']", "kind = 'python'\nentry = 'a:b'");
        assert!(found[0].contains("there is none with `dataset.columns`"), "{found:?}");
    }

    /// A stream trains on each record once, and no later pass has those that are left out.
    #[test]
    fn records_are_left_out_only_of_the_passes_of_synchronous_jobs() {
        let with = |mode: &str, dataset: &str| {
            let text = format!(
                "name = 'x'\nmode = '{mode}'\n{dataset}\nformat = 'csv'\nlabel = 'y'\nfeatures = ['x']\n\
                 [model]\nkind = 'linear'\n[sync]\ndrop_last = true"
            );
            job_file::parse(&text).err().map(|error| error.errors).unwrap_or_default()
        };
        let files = "passes = 9\n[dataset]\nsource = ['x']";
        assert_eq!(with("sync", files), [""; 0]);
        assert_eq!(with("async", files), ["`sync.drop_last` needs mode = \"sync\"; remove it"]);
        let found = with("sync", "[dataset]\nfollow = true\nsource = ['a/*']");
        assert!(found[0].contains("`sync.drop_last` does not apply to a stream"), "{found:?}");
    }

    #[test]
    fn what_depends_on_evaluations_needs_them() {
        let errors = |mode: &str, evaluation: &str| {
            let text = format!(
                "name = 'x'\nmode = '{mode}'\npasses = 9\n[dataset]\nsource = ['x']\nformat = 'csv'\n\
                 label = 'y'\nfeatures = ['x']\n[model]\nkind = 'linear'\n[evaluation]\n{evaluation}"
            );
            job_file::parse(&text).err().map(|error| error.errors).unwrap_or_default()
        };
        for sound in [
            "fraction = 0.1\npatience = 3\nmin_delta = 0.01",
            "fraction = 0.1\nkeep = 'best'",
            "fraction = 0.1\nkeep = 'best'\nevery_steps = 9",
            "source = ['x.csv']\nkeep = 'best'",
            "fraction = 0.1\npatience = 1\nmonitor = 'metric'\ngoal = 'max'",
            "fraction = 0.1\nmonitor = 'metric'\ngoal = 'max'\nreduce_on_plateau = {}",
        ] {
            assert_eq!(errors("sync", sound), [""; 0], "{sound}");
        }
        for (wrong, named) in [
            ("patience = 3", "`evaluation.patience` needs held-out records"),
            ("keep = 'best'", "`evaluation.keep` needs held-out records"),
            ("fraction = 0.1\npatience = 0", "`evaluation.patience` must be at least 1"),
            ("fraction = 0.1\nsource = ['x.csv']", "`evaluation.source` are mutually exclusive"),
            ("patience = 1", "set `evaluation.fraction` or `evaluation.source`"),
            (
                "fraction = 0.1\npatience = 1\nmin_delta = -1",
                "`evaluation.min_delta` must be finite",
            ),
            ("fraction = 0.1\nkeep = 'best'\nmin_delta = 1", "`evaluation.min_delta` applies only"),
            (
                "fraction = 0.1\nmonitor = 'metric'\ngoal = 'max'",
                "`evaluation.monitor` applies only",
            ),
            ("fraction = 0.1\npatience = 1\nmonitor = 'metric'", "needs `evaluation.goal`"),
            ("reduce_on_plateau = {}", "`evaluation.reduce_on_plateau` needs held-out records"),
            ("fraction = 0.1\nreduce_on_plateau = { factor = 1 }", "factor` must lie in 0 < … < 1"),
            (
                "fraction = 0.1\nreduce_on_plateau = { patience = 0 }",
                "patience` must be at least 1",
            ),
            ("fraction = 0.1\nreduce_on_plateau = { min_delta = -1 }", "min_delta` must be finite"),
            ("fraction = 0.1\nreduce_on_plateau = { min_rate = nan }", "min_rate` must be finite"),
            (
                "fraction = 0.1\nreduce_on_plateau = { min_delta_mode = 'relative' }",
                "min_delta_mode` applies only with its `min_delta`",
            ),
            ("fraction = 0.1\npatience = 1\ngoal = 'min'", "`evaluation.goal` applies to"),
            ("fraction = 0.1\nevery_steps = 0", "`evaluation.every_steps` must be at least 1"),
            ("fraction = 0.1\nevery_steps = 1\nevery_passes = 1", "are mutually exclusive"),
        ] {
            let found = errors("sync", wrong);
            assert!(found.len() == 1 && found[0].contains(named), "{wrong}: {found:?}");
        }
        let found = errors("async", "fraction = 0.1\nevery_steps = 3");
        assert!(found[0].starts_with("`evaluation.every_steps` needs mode"), "{found:?}");
        let found = errors("async", "fraction = 0.1\npatience = 3");
        assert!(found[0].starts_with("`evaluation.patience` needs mode"), "{found:?}");
    }

    #[test]
    fn empty_features_have_a_finite_value_where_features_can_be_empty() {
        let linear = |dataset: &str| errors(&format!("label = 'y'\n{dataset}"), "kind = 'linear'");
        assert_eq!(linear("features = ['x']\nmissing = -1\ntransform = 'log1p'"), [""; 0]);
        let found = linear("features = ['x']\nmissing = nan");
        assert_eq!(found, ["`dataset.missing` must be a finite number"]);
        let python = "kind = 'python'\nentry = 'a:b'";
        let found = errors("columns = ['x']\nmissing = 0\ntransform = 'log1p'", python);
        assert_eq!(found.len(), 2, "{found:?}");
    }
}
