//! Reads a job file and says everything that is wrong with it in one go.

use std::collections::BTreeSet;

use sha2::{Digest, Sha256};

use crate::compression::Compression;
use crate::dataset::hex;
use crate::faults_optimizer;
use crate::spec::{DataFormat, JobSpec, LANES_MAX, Mode};

/// Every key of a job file, by its full path; the schema that suggestions are made from.
const KEYS: &[&str] = &[
    "name",
    "seed",
    "mode",
    "passes",
    "steps",
    "dataset",
    "dataset.source",
    "dataset.format",
    "dataset.features",
    "dataset.label",
    "dataset.feature_scale",
    "dataset.records_per_task",
    "dataset.header",
    "model",
    "model.kind",
    "model.classes",
    "model.hidden",
    "model.activation",
    "model.dropout",
    "model.options",
    "optimizer",
    "optimizer.kind",
    "optimizer.momentum",
    "optimizer.nesterov",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.rho",
    "optimizer.epsilon",
    "optimizer.initial_accumulator",
    "optimizer.learning_rate_power",
    "optimizer.l1",
    "optimizer.l2",
    "optimizer.weight_decay",
    "optimizer.clip_value",
    "optimizer.clip_norm",
    "learning_rate",
    "learning_rate.schedule",
    "learning_rate.base",
    "learning_rate.warmup_steps",
    "learning_rate.every_steps",
    "learning_rate.gamma",
    "learning_rate.decay_steps",
    "learning_rate.end",
    "learning_rate.power",
    "sync",
    "sync.lanes",
    "sync.micro_batch",
    "async",
    "async.batch",
    "async.push_every",
    "async.pull_every",
    "async.max_staleness",
    "async.lost_pserver",
    "gradients",
    "gradients.compression",
    "gradients.keep",
    "tasks",
    "tasks.deadline",
    "tasks.failures_max",
    "evaluation",
    "evaluation.fraction",
    "evaluation.every_passes",
    "checkpoint",
    "checkpoint.every",
    "checkpoint.every_steps",
    "checkpoint.keep",
];

/// Models that every trainer knows.
pub const BUILT_IN_MODELS: &[&str] = &["linear", "softmax", "mlp"];

/// Everything that is wrong with a job file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .faults.join("\n"))]
pub struct JobFileError {
    /// One sentence a fault; never empty.
    pub faults: Vec<String>,
}

/// Parses a job file (TOML) and checks it.
///
/// # Errors
/// All faults: unknown keys (with the nearest known one), wrong types, values out of range and
/// contradictions.
pub fn parse(text: &str) -> Result<JobSpec, JobFileError> {
    let fail = |fault: String| JobFileError { faults: vec![fault] };
    let document = toml::Deserializer::parse(text).map_err(|error| fail(describe(text, &error)))?;
    let mut unknown = Vec::new();
    let spec: JobSpec = serde_ignored::deserialize(document, |path| unknown.push(path.to_string()))
        .map_err(|error| {
            let mut faults = unknown_faults(&unknown);
            faults.push(describe(text, &error));
            JobFileError { faults }
        })?;
    let mut faults = unknown_faults(&unknown);
    faults.extend(spec.faults());
    if faults.is_empty() { Ok(spec) } else { Err(JobFileError { faults }) }
}

fn describe(text: &str, error: &toml::de::Error) -> String {
    let message = error.message().trim_end_matches('.');
    let Some(span) = error.span() else { return message.to_owned() };
    let line = text[..span.start.min(text.len())].matches('\n').count() + 1;
    let shown = text.lines().nth(line - 1).unwrap_or("").trim();
    format!("line {line}: {message} (`{shown}`)")
}

fn unknown_faults(paths: &[String]) -> Vec<String> {
    paths.iter().map(|path| unknown_fault(path)).collect()
}

fn unknown_fault(path: &str) -> String {
    match nearest(path, KEYS.iter().copied()) {
        Some(key) => format!("unknown key `{path}`; did you mean `{key}`?"),
        None => format!("unknown key `{path}`; the known ones are in docs/job-file.md"),
    }
}

/// The candidate most like `name`, if one is like it at all.
pub fn nearest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let scored = candidates.map(|it| (strsim::jaro_winkler(name, it), it));
    let best = scored.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (0.8 <= best.0).then_some(best.1)
}

impl JobSpec {
    /// SHA-256 of the spec's canonical JSON, in hexadecimal.
    pub fn digest(&self) -> String {
        let json = serde_json::to_vec(self).expect("a spec is plain data");
        hex(&Sha256::digest(json))
    }

    /// Everything about the values that cannot work, as sentences that name the key.
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        self.general_faults(&mut faults);
        self.dataset_faults(&mut faults);
        self.model_faults(&mut faults);
        self.rhythm_faults(&mut faults);
        self.gradient_faults(&mut faults);
        faults.extend(faults_optimizer::optimizer(&self.optimizer));
        faults.extend(faults_optimizer::learning_rate(&self.learning_rate));
        faults
    }

    fn general_faults(&self, faults: &mut Vec<String>) {
        let allowed = |it: char| it.is_ascii_alphanumeric() || "-_.".contains(it);
        let named =
            !self.name.is_empty() && self.name.len() <= 100 && self.name.chars().all(allowed);
        if !named || self.name.starts_with('.') {
            faults.push(format!(
                "`name` is `{}`; use 1 to 100 letters, digits, `-`, `_` or `.`, no leading `.`",
                self.name
            ));
        }
        match (self.mode, self.passes, self.steps) {
            (_, None, None) => {
                faults.push("neither `passes` nor `steps` says how long to train".to_owned());
            }
            (_, Some(_), Some(_)) => {
                faults.push("`passes` and `steps` exclude each other; keep one".to_owned());
            }
            (Mode::Async, None, Some(_)) => faults.push(
                "`steps` needs mode = \"sync\"; an asynchronous job ends after `passes`".to_owned(),
            ),
            (Mode::Sync | Mode::Async, ..) => {}
        }
        if self.passes == Some(0) || self.steps == Some(0) {
            faults.push("`passes` and `steps` must be at least 1".to_owned());
        }
    }

    fn dataset_faults(&self, faults: &mut Vec<String>) {
        let dataset = &self.dataset;
        if dataset.source.is_empty() {
            faults.push("`dataset.source` names no file".to_owned());
        }
        if dataset.features.is_empty() {
            faults.push("`dataset.features` names no column".to_owned());
        }
        if BTreeSet::from_iter(&dataset.features).contains(&dataset.label) {
            faults.push(format!("`dataset.label` `{}` is also a feature", dataset.label));
        }
        if !dataset.feature_scale.is_finite() || dataset.feature_scale == 0.0 {
            faults.push("`dataset.feature_scale` must be a finite number other than 0".to_owned());
        }
        if dataset.records_per_task == Some(0) {
            faults.push("`dataset.records_per_task` must be at least 1".to_owned());
        }
        if dataset.format == DataFormat::Parquet && dataset.header != crate::spec::Header::Present {
            faults.push("`dataset.header` means nothing to Parquet; remove it".to_owned());
        }
        if !(0.0..=0.9).contains(&self.evaluation.fraction) {
            faults.push("`evaluation.fraction` must lie between 0 and 0.9".to_owned());
        }
        if self.evaluation.every_passes == Some(0) {
            faults.push("`evaluation.every_passes` must be at least 1".to_owned());
        }
    }

    fn model_faults(&self, faults: &mut Vec<String>) {
        let model = &self.model;
        if !(0.0..1.0).contains(&model.dropout) {
            faults.push("`model.dropout` must lie in 0 ≤ … < 1".to_owned());
        }
        if model.hidden.contains(&0) {
            faults.push("`model.hidden` has a layer of width 0".to_owned());
        }
        match model.kind.as_str() {
            "mlp" if model.hidden.is_empty() => {
                faults.push("`model.hidden` is needed by `mlp`, for example [64, 32]".to_owned());
            }
            "softmax" if model.classes.is_none() => {
                faults.push("`model.classes` is needed by `softmax`".to_owned());
            }
            "linear" if model.classes.is_some() => {
                faults.push("`model.classes` means nothing to `linear`; remove it".to_owned());
            }
            _ => {}
        }
        if BUILT_IN_MODELS.contains(&model.kind.as_str()) && !model.options.is_empty() {
            faults.push(format!("`model.options` means nothing to `{}`", model.kind));
        }
        if matches!(model.kind.as_str(), "linear" | "softmax") {
            if !model.hidden.is_empty() {
                faults.push(format!("`model.hidden` means nothing to `{}`", model.kind));
            }
            if model.dropout != 0.0 {
                faults.push(format!("`model.dropout` means nothing to `{}`", model.kind));
            }
        }
        if model.classes.is_some_and(|classes| classes < 2) {
            faults.push("`model.classes` must be at least 2".to_owned());
        }
    }

    fn gradient_faults(&self, faults: &mut Vec<String>) {
        let sparse = self.gradients.compression == Compression::TopK;
        if sparse && self.mode == Mode::Sync {
            faults.push(
                "`gradients.compression` `top_k` needs mode = \"async\"; use `bf16` or `int8`"
                    .to_owned(),
            );
        }
        match self.gradients.keep {
            Some(_) if !sparse => {
                faults.push("`gradients.keep` means nothing without `top_k`; remove it".to_owned());
            }
            Some(keep) if !(0.0 < keep && keep <= 1.0) => {
                faults.push("`gradients.keep` must lie in 0 < … ≤ 1".to_owned());
            }
            Some(_) | None => {}
        }
    }

    fn rhythm_faults(&self, faults: &mut Vec<String>) {
        let mut at_least_one = |key: &str, value: u64| {
            if value == 0 {
                faults.push(format!("`{key}` must be at least 1"));
            }
        };
        at_least_one("sync.lanes", u64::from(self.sync.lanes));
        at_least_one("sync.micro_batch", u64::from(self.sync.micro_batch));
        at_least_one("async.batch", u64::from(self.asynchronous.batch));
        at_least_one("async.push_every", u64::from(self.asynchronous.push_every));
        at_least_one("async.pull_every", u64::from(self.asynchronous.pull_every));
        at_least_one("tasks.deadline", self.tasks.deadline.as_millis() as u64);
        at_least_one("checkpoint.keep", u64::from(self.checkpoint.keep));
        at_least_one("checkpoint.every_steps", self.checkpoint.every_steps.unwrap_or(1));
        at_least_one(
            "checkpoint.every",
            self.checkpoint.every.map_or(1, |every| every.as_millis() as u64),
        );
        if LANES_MAX < self.sync.lanes {
            faults.push(format!("`sync.lanes` is larger than {LANES_MAX}"));
        }
        if self.mode == Mode::Async && self.checkpoint.every_steps.is_some() {
            faults.push(
                "`checkpoint.every_steps` needs mode = \"sync\"; use `checkpoint.every`".to_owned(),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compression::Codec;

    const GOOD: &str = r#"
        name = "digits"
        passes = 3
        [dataset]
        source = ["digits.parquet"]
        format = "parquet"
        features = ["pixel_*"]
        label = "digit"
        [model]
        kind = "mlp"
        hidden = [32]
        classes = 10
        [tasks]
        deadline = "30s"
    "#;

    #[test]
    fn a_small_job_file_is_completed_with_defaults() {
        let spec = parse(GOOD).unwrap();
        assert_eq!(spec.mode, Mode::Sync);
        assert_eq!(spec.sync.lanes, 8);
        assert_eq!(spec.tasks.deadline.as_secs(), 30);
    }

    #[test]
    fn a_spec_survives_the_way_through_etcd() {
        let spec = parse(GOOD).unwrap();
        let json = serde_json::to_string(&spec).unwrap();
        let back: JobSpec = serde_json::from_str(&json).unwrap();
        assert_eq!(back, spec);
        assert_eq!(back.digest(), spec.digest());
    }

    #[test]
    fn an_unknown_key_is_refused_with_a_suggestion() {
        let error = parse(&GOOD.replace("hidden", "hiden")).unwrap_err();
        assert_eq!(error.faults[0], "unknown key `model.hiden`; did you mean `model.hidden`?");
    }

    #[test]
    fn all_faults_are_reported_at_once() {
        let text = GOOD.replace("passes = 3", "passes = 0").replace("kind", "optimiser = 1\nkind");
        let text = text + "\n[sync]\nlanes = 0\nmicro_batch = 0";
        assert_eq!(parse(&text).unwrap_err().faults.len(), 4);
    }

    #[test]
    fn compression_that_cannot_work_is_refused() {
        let with = |mode: &str, keys: &str| {
            let text = GOOD.replace("passes = 3", &format!("passes = 3\nmode = \"{mode}\""));
            parse(&format!("{text}\n[gradients]\n{keys}")).map_err(|error| error.faults.len())
        };
        let top = "compression = \"top_k\"";
        assert_eq!(with("sync", top).unwrap_err(), 1);
        assert_eq!(with("sync", "compression = \"int8\"\nkeep = 0.1").unwrap_err(), 1);
        for keep in ["0.0", "1.5", "-1.0", "nan"] {
            assert_eq!(with("async", &format!("{top}\nkeep = {keep}")).unwrap_err(), 1);
        }
        assert_eq!(with("async", top).unwrap().gradients.codec(), Codec::Sparse { keep: 0.01 });
        assert_eq!(with("sync", "compression = \"bf16\"").unwrap().gradients.codec(), Codec::Bf16);
        assert_eq!(parse(GOOD).unwrap().gradients.codec(), Codec::Plain);
    }

    #[test]
    fn a_type_error_names_the_line() {
        let error = parse(&GOOD.replace("passes = 3", "passes = \"three\"")).unwrap_err();
        assert!(error.to_string().contains("line 3"), "{error}");
    }

    #[test]
    fn every_known_key_is_accepted_by_the_parser() {
        for key in KEYS.iter().filter(|key| key.contains('.')) {
            let (table, name) = key.split_once('.').unwrap();
            let text = format!("{table} = {{ {name} = 1 }}");
            let mut unknown = Vec::new();
            let document = toml::Deserializer::parse(&text).unwrap();
            let _: Result<JobSpec, _> =
                serde_ignored::deserialize(document, |path| unknown.push(path.to_string()));
            assert!(unknown.is_empty(), "{key} is in KEYS but not in JobSpec");
        }
    }
}
