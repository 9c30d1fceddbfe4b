//! Parses a job file and reports all errors at once.

use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;

use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use toml::Spanned;
use toml::de::{DeTable, DeValue, Deserializer};

use crate::job::dataset::hex;
use crate::job::elastic::ElasticSpec;
use crate::job::shape::keys_of;
use crate::job::spec::{CLOSURES, JobSpec};
use crate::job::spec_errors::SpecError;

/// A job file of either kind.
#[derive(Clone, Debug, PartialEq)]
pub enum JobFile {
    Training(Box<JobSpec>),
    Elastic(ElasticSpec),
}

/// What a job file of one kind may contain.
trait Described: DeserializeOwned {
    /// Sections whose keys are names that the file chooses.
    const NAMED: &[&str] = &[];
    /// Keys without a default.
    const REQUIRED: &[&str];
    /// A job file with only the required keys, for checking one other key at a time.
    const MINIMAL: &str;

    /// Returns the keys that need not be in the file after all, given those that are; their placeholders are removed.
    fn not_required(
        _valid: &mut DeTable<'_>,
        _given: impl Fn(&str) -> bool,
    ) -> &'static [&'static str] {
        &[]
    }

    fn all_errors(&self) -> Vec<SpecError>;
}

impl Described for JobSpec {
    const NAMED: &[&str] = &["tables"];
    const REQUIRED: &[&str] =
        &["name", "dataset", "dataset.source", "dataset.format", "model", "model.kind"];
    const MINIMAL: &str = r#"
        name = "x"
        dataset = { source = ["x"], format = "csv" }
        model = { kind = "x" }
    "#;

    fn not_required(
        valid: &mut DeTable<'_>,
        given: impl Fn(&str) -> bool,
    ) -> &'static [&'static str] {
        let model = valid.get("model").and_then(|it| it.get_ref().as_table());
        let kind = model.and_then(|it| it.get("kind")).and_then(|it| it.get_ref().as_str());
        if kind != Some(CLOSURES) || given("dataset") {
            return &[];
        }
        valid.remove("dataset");
        &["dataset", "dataset.source", "dataset.format"]
    }

    fn all_errors(&self) -> Vec<SpecError> {
        self.all_errors()
    }
}

impl Described for ElasticSpec {
    const REQUIRED: &[&str] = &["name", "nodes", "nodes.min", "nodes.max"];
    const MINIMAL: &str = r#"
        name = "x"
        nodes = { min = 1, max = 1 }
    "#;

    fn all_errors(&self) -> Vec<SpecError> {
        self.all_errors()
    }
}

/// The errors of a job file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .errors.join("\n"))]
pub struct JobFileError {
    /// One message for each error, in the order of the file; never empty.
    pub errors: Vec<String>,
}

/// Returns the paths of all keys of the file of a training job, such as `sync.lanes`, and of its sections.
pub fn training_keys() -> Vec<String> {
    keys_of::<JobSpec>()
}

/// Returns the paths of all keys of the file of an elastic job, and of its sections.
pub fn elastic_keys() -> Vec<String> {
    keys_of::<ElasticSpec>()
}

/// Parses the file (TOML) of a job of either kind, and checks it.
///
/// # Errors
/// All errors: unknown keys (with the nearest known one), wrong types, values out of range and conflicts.
/// If the text is not valid TOML, only the syntax errors.
pub fn parse_any(text: &str) -> Result<JobFile, JobFileError> {
    let mut document = document(text)?;
    let kind = document.remove("kind").map(|value| (value.span(), value.into_inner()));
    match kind {
        None => read(text, document).map(|spec| JobFile::Training(Box::new(spec))),
        Some((_, DeValue::String(kind))) if kind == "training" => {
            read(text, document).map(|spec| JobFile::Training(Box::new(spec)))
        }
        Some((_, DeValue::String(kind))) if kind == "elastic" => {
            read(text, document).map(JobFile::Elastic)
        }
        Some((span, _)) => {
            let line = line_of(text, span.start);
            let error = format!("line {line}: `kind` must be \"training\" or \"elastic\"");
            Err(JobFileError { errors: vec![error] })
        }
    }
}

/// Parses the file (TOML) of a training job, and checks it.
///
/// # Errors
/// See [`parse_any`]; also if the job is elastic.
pub fn parse(text: &str) -> Result<JobSpec, JobFileError> {
    match parse_any(text)? {
        JobFile::Training(spec) => Ok(*spec),
        JobFile::Elastic(_) => {
            let error =
                "the job is elastic (`kind`): it runs under agents, see `steadfast run --help`";
            Err(JobFileError { errors: vec![error.to_owned()] })
        }
    }
}

fn document(text: &str) -> Result<DeTable<'_>, JobFileError> {
    let (document, mut errors) = DeTable::parse_recoverable(text);
    if errors.is_empty() {
        return Ok(document.into_inner());
    }
    errors.sort_by_key(|error| error.span().map(|span| span.start));
    let errors = errors.iter().map(|error| describe(text, None, error)).collect();
    Err(JobFileError { errors })
}

fn read<T: Described>(text: &str, document: DeTable<'_>) -> Result<T, JobFileError> {
    let mut reader = Reader::new(text);
    reader.read_tables(document);
    reader.find_missing();
    reader.finish()
}

/// Reads a job file key by key, so that an invalid key does not hide errors of others.
struct Reader<'a, T> {
    text: &'a str,
    /// Every key by its full path; also the candidates for suggestions.
    keys: Vec<String>,
    /// Offset of each key in the file.
    offsets: BTreeMap<String, usize>,
    /// The job file with the valid keys only, and with placeholders for missing ones.
    valid: DeTable<'a>,
    /// Missing keys, and keys with invalid values: checks that depend on them are skipped.
    invalid: BTreeSet<String>,
    /// Suggestions for unknown keys.
    suggested: BTreeSet<String>,
    /// Errors with their offsets.
    errors: Vec<(usize, String)>,
    spec: PhantomData<T>,
}

impl<'a, T: Described> Reader<'a, T> {
    fn new(text: &'a str) -> Self {
        Self {
            text,
            keys: keys_of::<T>(),
            offsets: BTreeMap::new(),
            valid: minimal::<T>(),
            invalid: BTreeSet::new(),
            suggested: BTreeSet::new(),
            errors: Vec::new(),
            spec: PhantomData,
        }
    }

    fn read_tables(&mut self, document: DeTable<'a>) {
        for (name, value) in document {
            let (offset, name) = (name.span().start, name.into_inner());
            if !self.is_table(&name) {
                self.read(None, &name, offset, value);
                continue;
            }
            self.offsets.insert(name.to_string(), offset);
            let kind = value.get_ref().type_str();
            let DeValue::Table(table) = value.into_inner() else {
                self.errors.push((offset, format!("`{name}` is of type {kind}; use `[{name}]`")));
                self.invalid.insert(name.into_owned());
                continue;
            };
            for (key, value) in table {
                self.read(Some(&name), key.get_ref(), key.span().start, value);
            }
        }
    }

    /// Adds a key to the valid ones if it is known and its value has the right type.
    fn read(&mut self, table: Option<&str>, key: &str, offset: usize, value: Spanned<DeValue<'a>>) {
        let path = table.map_or_else(|| key.to_owned(), |table| format!("{table}.{key}"));
        let is_named = table.is_some_and(|table| T::NAMED.contains(&table));
        if !is_named && !self.keys.contains(&path) {
            let meant = nearest(&path, self.keys.iter().map(String::as_str));
            self.errors.push((offset, unknown_error(&path, meant)));
            self.suggested.extend(meant.map(str::to_owned));
            return;
        }
        self.offsets.insert(path.clone(), offset);
        let mut alone = minimal::<T>();
        put(&mut alone, table, key, value.clone());
        match deserialize::<T>(alone) {
            Ok(_) => put(&mut self.valid, table, key, value),
            Err(error) => {
                self.errors.push((offset, describe(self.text, Some(&path), &error)));
                self.invalid.insert(path);
            }
        }
    }

    fn find_missing(&mut self) {
        let offsets = &self.offsets;
        let not_required = T::not_required(&mut self.valid, |key| offsets.contains_key(key));
        for key in T::REQUIRED.iter().filter(|key| !not_required.contains(key)) {
            let is_missing = !self.offsets.contains_key(*key) && !self.is_invalid(key);
            if is_missing {
                let offset = self.offset(&[(*key).to_owned()]);
                let shown = if self.is_table(key) { format!("[{key}]") } else { (*key).to_owned() };
                self.errors.push((offset, format!("`{shown}` is missing")));
                self.invalid.insert((*key).to_owned());
            }
        }
    }

    fn finish(mut self) -> Result<T, JobFileError> {
        let spec: T = match deserialize::<T>(std::mem::take(&mut self.valid)) {
            Ok(spec) => spec,
            Err(error) => {
                return Err(JobFileError { errors: vec![describe(self.text, None, &error)] });
            }
        };
        for error in Described::all_errors(&spec) {
            if !error.keys.iter().any(|key| self.is_invalid(key)) {
                self.errors.push((self.offset(&error.keys), error.text));
            }
        }
        if self.errors.is_empty() {
            return Ok(spec);
        }
        self.errors.sort_by_key(|(offset, _)| *offset);
        Err(JobFileError { errors: self.errors.into_iter().map(|(_, text)| text).collect() })
    }

    fn is_invalid(&self, key: &str) -> bool {
        let table = key.split_once('.').map_or(key, |(table, _)| table);
        let is_misspelled = |key| self.suggested.contains(key) && !self.offsets.contains_key(key);
        [key, table].into_iter().any(|key| self.invalid.contains(key) || is_misspelled(key))
    }

    fn is_table(&self, key: &str) -> bool {
        let is_in = |known: &String| known.split_once('.').is_some_and(|(table, _)| table == key);
        T::NAMED.contains(&key) || self.keys.iter().any(is_in)
    }

    /// Returns the offset of the first of these keys that is in the file. If there is none, returns the
    /// offset of the first key's table, or the end of the file without that table; for a key outside of
    /// tables, the beginning of the file.
    fn offset(&self, keys: &[String]) -> usize {
        if let Some(offset) = keys.iter().find_map(|key| self.offsets.get(key)) {
            return *offset;
        }
        match keys.first().map(|key| key.split_once('.').map_or(key.as_str(), |it| it.0)) {
            Some(table) if self.is_table(table) => {
                self.offsets.get(table).copied().unwrap_or(self.text.len())
            }
            Some(_) | None => 0,
        }
    }
}

fn minimal<T: Described>() -> DeTable<'static> {
    DeTable::parse(T::MINIMAL).expect("a constant").into_inner()
}

fn put<'a>(
    document: &mut DeTable<'a>,
    table: Option<&str>,
    key: &str,
    value: Spanned<DeValue<'a>>,
) {
    let named = |name: &str| Spanned::new(0..0, name.to_owned().into());
    let Some(table) = table else {
        document.insert(named(key), value);
        return;
    };
    let empty = || Spanned::new(0..0, DeValue::Table(DeTable::new()));
    let inner = document.entry(named(table)).or_insert_with(empty).get_mut();
    if let DeValue::Table(inner) = inner {
        inner.insert(named(key), value);
    }
}

fn deserialize<T: Described>(document: DeTable<'_>) -> Result<T, toml::de::Error> {
    T::deserialize(Deserializer::from(Spanned::new(0..0, document)))
}

/// Describes an error with its line and, for an invalid value, the key.
fn describe(text: &str, key: Option<&str>, error: &toml::de::Error) -> String {
    let message = error.message().trim_end_matches('.');
    let message = key.map_or(message.to_owned(), |key| format!("`{key}`: {message}"));
    let Some(span) = error.span() else { return message };
    let line = line_of(text, span.start);
    let shown = text.lines().nth(line - 1).unwrap_or("").trim();
    format!("line {line}: {message} (`{shown}`)")
}

fn line_of(text: &str, offset: usize) -> usize {
    text[..offset.min(text.len())].matches('\n').count() + 1
}

fn unknown_error(path: &str, meant: Option<&str>) -> String {
    match meant {
        Some(key) => format!("unknown key `{path}`; did you mean `{key}`?"),
        None => format!("unknown key `{path}`; see docs/job-file.md for all keys"),
    }
}

/// Returns the candidate most similar to `name`, if one is similar enough.
pub fn nearest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let scored = candidates.map(|it| (strsim::jaro_winkler(name, it), it));
    let best = scored.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (0.8 <= best.0).then_some(best.1)
}

impl JobSpec {
    /// Returns the SHA-256 of the spec's canonical JSON, in lower-case hexadecimal.
    pub fn digest(&self) -> String {
        let json = serde_json::to_vec(self).expect("a spec is plain data");
        hex(&Sha256::digest(json))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::spec::DatasetSpec;
    use crate::job::spec::Mode;
    use crate::tensor::compression::Codec;

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
    fn a_spec_survives_a_round_trip_through_etcd() {
        let spec = parse(GOOD).unwrap();
        let json = serde_json::to_string(&spec).unwrap();
        let back: JobSpec = serde_json::from_str(&json).unwrap();
        assert_eq!(back, spec);
        assert_eq!(back.digest(), spec.digest());
    }

    #[test]
    fn an_unknown_key_is_rejected_with_a_suggestion() {
        let error = parse(&GOOD.replace("hidden", "hiden")).unwrap_err();
        assert_eq!(error.errors[0], "unknown key `model.hiden`; did you mean `model.hidden`?");
    }

    #[test]
    fn all_errors_are_reported_together() {
        let text = GOOD.replace("passes = 3", "passes = 0").replace("kind", "optimizer = 1\nkind");
        let text = text + "\n[sync]\nlanes = 0\nmicro_batch = 0";
        assert_eq!(parse(&text).unwrap_err().errors.len(), 4);
    }

    #[test]
    fn impossible_compression_is_rejected() {
        let with = |mode: &str, keys: &str| {
            let text = GOOD.replace("passes = 3", &format!("passes = 3\nmode = \"{mode}\""));
            parse(&format!("{text}\n[gradients]\n{keys}")).map_err(|error| error.errors.len())
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
    fn a_wrong_type_hides_no_other_error_and_all_are_in_the_order_of_the_file() {
        let text = r#"
            sede = 7
            seed = "x"
            passes = 0
            [dataset]
            source = "digits.parquet"
            format = "excel"
            features = ["pixel_*"]
            feature_scale = 0
            [model]
            hidden = [32, "x"]
            knd = "mlp"
            [optimizer]
            kind = "adm"
            beta1 = 0.5
            [checkpoint]
            every = "often"
            keep = 0
            [evaluation]
            fraction = 2.0
            every_passes = true
            [zebra]
            x = 1
        "#;
        let errors = parse(text).unwrap_err().errors;
        let expected = [
            "`name` is missing",
            "unknown key `sede`; did you mean `seed`?",
            "line 3: `seed`: invalid type: string \"x\", expected u64 (`seed = \"x\"`)",
            "`passes` must be at least 1",
            "`dataset.label` is missing; name the column to predict",
            "line 6: `dataset.source`: invalid type: string \"digits.parquet\", expected a sequence \
             (`source = \"digits.parquet\"`)",
            "line 7: `dataset.format`: unknown variant `excel`, expected one of `parquet`, `csv`, `tsv`, \
             `jsonl`, `tfrecord`, `libsvm`, `webdataset` \
             (`format = \"excel\"`)",
            "`dataset.feature_scale` must be a finite number other than 0",
            "line 11: `model.hidden`: invalid type: string \"x\", expected usize (`hidden = [32, \"x\"]`)",
            "unknown key `model.knd`; did you mean `model.kind`?",
            "line 14: `optimizer.kind`: unknown variant `adm`, expected one of `sgd`, `momentum`, `adagrad`, \
             `adadelta`, `rmsprop`, `adam`, `adamw`, `ftrl`, `lion`, `nadam`, `radam`, \
             `lamb`, `lars`, `rule` (`kind = \"adm\"`)",
            "line 17: `checkpoint.every`: cannot parse `often` as a duration (`30s`, `10m`): expected number at 0 \
             (`every = \"often\"`)",
            "`checkpoint.keep` must be at least 1",
            "`evaluation.fraction` must lie between 0 and 0.9",
            "line 21: `evaluation.every_passes`: invalid type: boolean `true`, expected u32 (`every_passes = true`)",
            "unknown key `zebra`; see docs/job-file.md for all keys",
        ];
        for (found, expected) in errors.iter().zip(expected) {
            assert_eq!(found, expected);
        }
        assert_eq!(errors.len(), expected.len(), "{errors:#?}");
    }

    /// Whether `beta1` applies depends on the rule, which is invalid here.
    #[test]
    fn checks_that_depend_on_a_wrong_value_are_skipped() {
        let with = |keys: &str| parse(&format!("{GOOD}\n{keys}")).unwrap_err().errors;
        let errors = with("[optimizer]\nkind = 1\nbeta1 = 0.5");
        assert_eq!(errors.len(), 1, "{errors:?}");
        let errors = with("[learning_rate]\nschedule = 1\ngamma = 0.5\nbase = -1.0");
        assert_eq!(errors.len(), 2, "{errors:?}");
        let errors = parse(&GOOD.replace("passes = 3", "passes = \"3\"")).unwrap_err().errors;
        assert_eq!(errors.len(), 1, "{errors:?}");
        let errors = parse(&GOOD.replace("kind = \"mlp\"", "")).unwrap_err().errors;
        assert_eq!(errors, ["`model.kind` is missing"]);
        for table in ["dataset = 3", "dataset = [[]]", "[[dataset]]"] {
            let text = format!("name = \"x\"\npasses = 1\nmodel.kind = \"linear\"\n{table}");
            let errors = parse(&text).unwrap_err().errors;
            assert_eq!(errors.len(), 1, "{errors:?}");
            assert!(errors[0].ends_with("use `[dataset]`"), "{errors:?}");
        }
        let errors = parse(&GOOD.replace("[dataset]", "[datset]")).unwrap_err().errors;
        assert_eq!(errors, ["unknown key `datset`; did you mean `dataset`?"]);
        let errors = parse("\n").unwrap_err().errors;
        let neither = "neither `passes` nor `steps` is set; set one";
        assert_eq!(errors[..2], ["`name` is missing", neither]);
        assert_eq!(errors[2..], ["`[dataset]` is missing", "`[model]` is missing"]);
    }

    #[test]
    fn every_syntax_error_is_reported() {
        let errors = parse("name = \npasses = 3\nname = 1\nx y\n").unwrap_err().errors;
        assert!(errors.len() > 1 && errors[0].contains("line 1"), "{errors:?}");
        assert!(errors.iter().all(|error| error.starts_with("line ")), "{errors:?}");
    }

    #[test]
    fn required_keys_have_no_default() {
        check_required::<JobSpec>();
        check_required::<ElasticSpec>();
    }

    #[test]
    fn the_keys_of_a_file_are_those_of_its_type() {
        let nodes = ["", ".min", ".max", ".unit", ".last_call", ".join_timeout"];
        let nodes = nodes.map(|it| format!("nodes{it}"));
        let elastic = [&["name", "records", "order"].map(str::to_owned)[..], &nodes].concat();
        assert_eq!(elastic_keys(), elastic);
        let training = training_keys();
        for key in ["async.lost_pserver", "tables", "gradients.keep", "model.options", "checkpoint"]
        {
            assert!(training.iter().any(|known| known == key), "{key}");
        }
        assert!(training.iter().all(|key| key.matches('.').count() < 2), "{training:?}");
    }

    fn check_required<T: Described>() {
        for key in T::REQUIRED {
            assert!(keys_of::<T>().iter().any(|known| known == key));
            let mut document = minimal::<T>();
            match key.split_once('.') {
                None => drop(document.remove(*key)),
                Some((table, name)) => {
                    let table = document.get_mut(table).unwrap().get_mut();
                    let DeValue::Table(table) = table else { panic!("{key}") };
                    drop(table.remove(name));
                }
            }
            // A job of closures has no dataset.
            assert!(*key == "dataset" || deserialize::<T>(document).is_err(), "{key}");
        }
    }

    /// S000-20: a job whose gradients come from closures has neither data nor an end of its own.
    #[test]
    fn a_job_of_closures_has_no_dataset() {
        let text = "name = \"x\"\nmode = \"async\"\n[model]\nkind = \"closures\"\n";
        let spec = parse(text).unwrap();
        assert!(spec.model.has_closures() && spec.dataset == DatasetSpec::default());
        let stored = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<JobSpec>(&stored).unwrap(), spec);
        let errors = |text: &str| parse(text).unwrap_err().errors;
        let data = "[dataset]\nsource = [\"x.csv\"]\nformat = \"csv\"\n";
        for (changed, wanted) in [
            (text.replace("async", "sync"), "needs `mode = \"async\"`"),
            (text.replace("[model]", "passes = 1\n[model]"), "remove `passes` and `steps`"),
            (format!("{text}{data}"), "remove `[dataset]`"),
            (format!("{text}[evaluation]\nfraction = 0.1\n"), "remove `[evaluation]`"),
            (
                format!("{text}[gradients]\ncompression = \"bf16\"\n"),
                "remove `gradients.compression`",
            ),
        ] {
            let errors = errors(&changed);
            assert!(errors.iter().any(|error| error.contains(wanted)), "{changed}: {errors:?}");
        }
        // Without the kind, the dataset is missing.
        let missing = errors(&text.replace("closures", "linear").replace("async", "sync"));
        assert!(
            missing.iter().any(|error| error.contains("`[dataset]` is missing")),
            "{missing:?}"
        );
    }

    #[test]
    fn the_kind_of_a_job_decides_which_keys_it_has() {
        let elastic = "name = \"ddp\"\nkind = \"elastic\"\n[nodes]\nmin = 1\nmax = 4\n";
        let JobFile::Elastic(spec) = parse_any(elastic).unwrap() else { panic!("{elastic}") };
        assert_eq!((spec.nodes.min, spec.nodes.max, spec.nodes.last_call.as_secs()), (1, 4, 30));
        let errors = |text: &str| parse_any(text).unwrap_err().errors;
        let given = errors(&elastic.replace("max = 4", "max = 0\nlast_cal = \"1s\""));
        let expected = [
            "`nodes.min` is 1, more than `nodes.max`, 0",
            "unknown key `nodes.last_cal`; did you mean `nodes.last_call`?",
        ];
        assert_eq!(given, expected);
        assert!(parse(elastic).unwrap_err().errors[0].contains("is elastic"));
        let training = format!("kind = \"training\"\n{GOOD}");
        assert_eq!(parse(&training), parse(GOOD));
        for kind in ["\"elastik\"", "3"] {
            let given = errors(&elastic.replace("\"elastic\"", kind));
            assert_eq!(given, ["line 2: `kind` must be \"training\" or \"elastic\""]);
        }
    }
}
