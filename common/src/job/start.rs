//! Which tensor of a file each parameter starts from.

use std::collections::{BTreeMap, BTreeSet};

use crate::job::spec::StartSpec;
use crate::job::wildcard::wildcard;
use crate::tensor::layout::{ParamSpec, UpdateRule};

/// The shapes of a file's tensors by name.
pub type Shapes = BTreeMap<String, Vec<usize>>;

/// Number of names in a message.
const SHOWN: usize = 8;

/// What a file gives to the parameters of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartPlan {
    /// The tensor of each parameter, in the order of the parameters; `None` for one that is new, and for a table.
    pub tensors: Vec<Option<String>>,
    /// Tensors that no parameter starts from.
    pub unused: Vec<String>,
}

impl StartPlan {
    /// Returns which tensor of a file with the state of an optimizer each parameter begins with, by the names of the
    /// vectors: that of vector `m` of the parameter that is `w` in the file of the model is `m/w`. Parameters that are new
    /// there, or that no optimizer updates, have none.
    ///
    /// # Errors
    /// A message, if the file lacks a tensor or has one of another shape.
    pub fn states(
        &self,
        parameters: &[ParamSpec],
        file: &Shapes,
    ) -> Result<BTreeMap<String, Self>, String> {
        let is_updated = |it: &ParamSpec| it.update == UpdateRule::Optimizer;
        let wanted: Vec<(&ParamSpec, Option<&String>)> = parameters
            .iter()
            .zip(&self.tensors)
            .map(|(it, tensor)| (it, tensor.as_ref().filter(|_| is_updated(it))))
            .collect();
        let known: BTreeSet<&str> =
            wanted.iter().filter_map(|(_, tensor)| tensor.map(String::as_str)).collect();
        let split = |name: &String| {
            name.split_once('/').map(|(vector, of)| (vector.to_owned(), of.to_owned()))
        };
        let vectors: BTreeSet<String> = file
            .keys()
            .filter_map(split)
            .filter(|(_, of)| known.contains(of.as_str()))
            .map(|(vector, _)| vector)
            .collect();
        let mut plans = BTreeMap::new();
        for vector in vectors {
            let mut tensors = Vec::new();
            for (parameter, tensor) in &wanted {
                let name = tensor.map(|tensor| format!("{vector}/{tensor}"));
                if let Some(name) = &name {
                    match file.get(name) {
                        Some(shape) if *shape == parameter.shape => {}
                        Some(shape) => {
                            return Err(format!(
                                "`{name}` in the file of `start.optimizer` is {shape:?}, not {:?}",
                                parameter.shape
                            ));
                        }
                        None => {
                            return Err(format!(
                                "the file of `start.optimizer` lacks `{name}`; take a state of these parameters, or leave \
                                 out `start.optimizer`"
                            ));
                        }
                    }
                }
                tensors.push(name);
            }
            plans.insert(vector, Self { tensors, unused: Vec::new() });
        }
        Ok(plans)
    }
}

impl StartSpec {
    /// Returns the errors of the settings themselves, with their keys.
    pub fn errors(&self) -> Vec<(&'static str, String)> {
        let mut errors = Vec::new();
        if self.file.is_empty() {
            let text = "`start.file` is missing; give the path or URL of a safetensors file";
            errors.push(("start.file", text.to_owned()));
        }
        let stars = |text: &str| text.matches('*').count();
        let uneven =
            |(ours, theirs): &(&String, &String)| 1 < stars(ours) || stars(ours) != stars(theirs);
        if let Some((ours, theirs)) = self.names.iter().find(uneven) {
            let text = format!(
                "`start.names`: `{ours}` = `{theirs}` must have one `*` on both sides, or none"
            );
            errors.push(("start.names", text));
        }
        errors
    }

    /// Finds the tensor of each parameter. Nothing is left out in silence: a parameter that is not in the file must be
    /// one of `new`.
    ///
    /// # Errors
    /// A message, if a parameter has no tensor or one of another shape, a name or pattern matches no parameter, or two
    /// entries of `names` match one.
    pub fn plan(&self, parameters: &[ParamSpec], file: &Shapes) -> Result<StartPlan, String> {
        let dense: Vec<&ParamSpec> = parameters.iter().filter(|it| it.table.is_none()).collect();
        self.check_patterns(&dense)?;
        let (mut tensors, mut missing, mut unlike) = (Vec::new(), Vec::new(), Vec::new());
        for parameter in parameters {
            if parameter.table.is_some() || self.is_new(&parameter.name) {
                tensors.push(None);
                continue;
            }
            let tensor = self.tensor_of(&parameter.name)?;
            match file.get(&tensor) {
                None => missing.push(tensor.clone()),
                Some(shape) if *shape != parameter.shape => {
                    unlike.push(format!("`{tensor}` is {shape:?}, not {:?}", parameter.shape));
                }
                Some(_) => {}
            }
            tensors.push(Some(tensor));
        }
        if let Some(first) = missing.first() {
            let names: Vec<String> = missing.iter().map(|name| format!("`{name}`")).collect();
            let remedy = renaming(first, file).unwrap_or_else(|| {
                "map their names in `start.names`, or list parameters that are not in it in `start.new`".to_owned()
            });
            return Err(format!("the file of `start` lacks {}; {remedy}", shown(&names)));
        }
        if !unlike.is_empty() {
            return Err(format!(
                "the file of `start` has other shapes: {}; list parameters that do not start from it in `start.new`",
                shown(&unlike)
            ));
        }
        if tensors.iter().all(Option::is_none) {
            return Err(
                "no parameter starts from the file of `start`; remove the section".to_owned()
            );
        }
        let is_used = |name: &&String| tensors.iter().flatten().any(|used| used == *name);
        let unused = file.keys().filter(|name| !is_used(name)).cloned().collect();
        Ok(StartPlan { tensors, unused })
    }

    fn is_new(&self, parameter: &str) -> bool {
        self.new.iter().any(|pattern| wildcard(pattern).matches(parameter))
    }

    /// Returns the name of a parameter's tensor.
    fn tensor_of(&self, parameter: &str) -> Result<String, String> {
        let mut matching = self.names.iter().filter_map(|(ours, theirs)| {
            renamed(ours, theirs, parameter).map(|tensor| (ours, tensor))
        });
        match (matching.next(), matching.next()) {
            (None, _) => Ok(parameter.to_owned()),
            (Some((_, tensor)), None) => Ok(tensor),
            (Some((first, _)), Some((second, _))) => Err(format!(
                "`start.names`: both `{first}` and `{second}` match the parameter `{parameter}`"
            )),
        }
    }

    fn check_patterns(&self, parameters: &[&ParamSpec]) -> Result<(), String> {
        let is_matched = |pattern: &String| {
            parameters.iter().any(|parameter| wildcard(pattern).matches(&parameter.name))
        };
        let names = self.names.keys().map(|pattern| ("names", pattern));
        let new = self.new.iter().map(|pattern| ("new", pattern));
        match names.chain(new).find(|(_, pattern)| !is_matched(pattern)) {
            None => Ok(()),
            Some((key, pattern)) => {
                let known: Vec<String> =
                    parameters.iter().map(|it| format!("`{}`", it.name)).collect();
                Err(format!(
                    "`{pattern}` in `start.{key}` matches no parameter; the model has {}",
                    shown(&known)
                ))
            }
        }
    }
}

/// Returns the name in the file that an entry of `names` gives a parameter, if it matches.
fn renamed(ours: &str, theirs: &str, parameter: &str) -> Option<String> {
    match ours.split_once('*') {
        None => (ours == parameter).then(|| theirs.to_owned()),
        Some((before, after)) => {
            let text = parameter.strip_prefix(before)?.strip_suffix(after)?;
            Some(theirs.replacen('*', text, 1))
        }
    }
}

/// Proposes an entry of `names`, if a tensor has the name of a parameter but for a prefix, such as `module.`.
fn renaming(missing: &str, file: &Shapes) -> Option<String> {
    let longer = file.keys().find_map(|tensor| tensor.strip_suffix(missing));
    let shorter = || file.keys().find_map(|tensor| missing.strip_suffix(tensor.as_str()));
    let is_prefix = |prefix: &&str| prefix.ends_with('.');
    let entry = match longer.filter(is_prefix) {
        Some(prefix) => format!("\"*\" = \"{prefix}*\""),
        None => shorter().filter(is_prefix).map(|prefix| format!("\"{prefix}*\" = \"*\""))?,
    };
    Some(format!("it has the same names but for a prefix: `[start.names]` with `{entry}`"))
}

fn shown(texts: &[String]) -> String {
    match texts.len() - texts.len().min(SHOWN) {
        0 => texts.join(", "),
        more => format!("{}, and {more} more", texts[..SHOWN].join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::job_file;
    use crate::tensor::table::Initial;

    fn parameters() -> Vec<ParamSpec> {
        vec![
            ParamSpec::new("body.weight", &[2, 3]),
            ParamSpec::new("body.bias", &[2]),
            ParamSpec::new("head.weight", &[4]),
            ParamSpec::table("rows", 2, Initial::Zeros),
        ]
    }

    fn file(tensors: &[(&str, &[usize])]) -> Shapes {
        tensors.iter().map(|(name, shape)| ((*name).to_owned(), shape.to_vec())).collect()
    }

    fn planned(start: &str, tensors: &[(&str, &[usize])]) -> Result<StartPlan, String> {
        let start: StartSpec = toml::from_str(&format!("file = 'a'\n{start}")).unwrap();
        assert_eq!(start.errors(), []);
        start.plan(&parameters(), &file(tensors))
    }

    const WHOLE: &[(&str, &[usize])] =
        &[("body.weight", &[2, 3]), ("body.bias", &[2]), ("head.weight", &[4])];

    #[test]
    fn parameters_start_from_the_tensors_of_their_names() {
        let plan = planned("", WHOLE).unwrap();
        let tensors = ["body.weight", "body.bias", "head.weight"].map(|it| Some(it.to_owned()));
        assert_eq!(plan.tensors, [&tensors[..], &[None]].concat());
        assert_eq!(plan.unused, Vec::<String>::new());
    }

    #[test]
    fn the_state_of_an_optimizer_has_the_names_of_the_file() {
        let given: &[(&str, &[usize])] =
            &[("module.b.weight", &[2, 3]), ("first", &[2]), ("head.weight", &[9])];
        let names =
            "new = ['head.*']\nnames = { 'body.*ht' = 'module.b.*ht', 'body.bias' = 'first' }";
        let plan = planned(names, given).unwrap();
        let whole: &[(&str, &[usize])] = &[
            ("m/module.b.weight", &[2, 3]),
            ("m/first", &[2]),
            ("m/head.weight", &[9]),
            ("x/y", &[1]),
        ];
        let states = plan.states(&parameters(), &file(whole)).unwrap();
        assert_eq!(states.keys().collect::<Vec<_>>(), ["m"]);
        let of = |name: &str| Some(name.to_owned());
        assert_eq!(states["m"].tensors, [of("m/module.b.weight"), of("m/first"), None, None]);
        let error = plan.states(&parameters(), &file(&whole[..1])).unwrap_err();
        assert!(
            error.starts_with("the file of `start.optimizer` lacks `m/first`; take"),
            "{error}"
        );
        let frozen = parameters()
            .into_iter()
            .map(|it| ParamSpec { update: UpdateRule::Frozen, ..it })
            .collect::<Vec<_>>();
        assert!(plan.states(&frozen, &file(whole)).unwrap().is_empty());
    }

    #[test]
    fn names_are_mapped_and_new_parameters_are_left_out() {
        let given: &[(&str, &[usize])] =
            &[("module.b.weight", &[2, 3]), ("first", &[2]), ("head.weight", &[9])];
        let plan = planned(
            "new = ['head.*']\nnames = { 'body.*ht' = 'module.b.*ht', 'body.bias' = 'first' }",
            given,
        );
        let plan = plan.unwrap();
        let of = |name: &str| Some(name.to_owned());
        assert_eq!(plan.tensors, [of("module.b.weight"), of("first"), None, None]);
        assert_eq!(plan.unused, ["head.weight"]);
    }

    #[test]
    fn nothing_is_left_out_in_silence() {
        let lacks = planned("", &WHOLE[..2]).unwrap_err();
        assert!(lacks.starts_with("the file of `start` lacks `head.weight`; map"), "{lacks}");
        let prefixed: &[(&str, &[usize])] = &[("module.body.weight", &[2, 3])];
        let error = planned("", prefixed).unwrap_err();
        assert!(error.contains("`\"*\" = \"module.*\"`"), "{error}");
        let bare: &[(&str, &[usize])] = &[("weight", &[2, 3])];
        let error = planned("", bare).unwrap_err();
        assert!(error.contains("`\"body.*\" = \"*\"`"), "{error}");
        let shapes: &[(&str, &[usize])] =
            &[("body.weight", &[3, 2]), ("body.bias", &[2]), ("head.weight", &[4])];
        let error = planned("", shapes).unwrap_err();
        assert!(error.contains("`body.weight` is [3, 2], not [2, 3]"), "{error}");
        let error = planned("new = ['tail.*']", WHOLE).unwrap_err();
        assert!(error.starts_with("`tail.*` in `start.new` matches no parameter"), "{error}");
        let error = planned("names = { 'b*' = 'c*', 'body.*' = 'd.*' }", WHOLE).unwrap_err();
        assert!(error.contains("both `b*` and `body.*` match"), "{error}");
        let error = planned("new = ['*']", WHOLE).unwrap_err();
        assert!(error.starts_with("no parameter starts from the file"), "{error}");
    }

    #[test]
    fn the_keys_of_the_section_are_checked_one_by_one() {
        let job = |start: &str| {
            job_file::parse(&format!(
                "name = 'x'\npasses = 1\n[dataset]\nsource = ['x']\nformat = 'csv'\nfeatures = ['x']\n\
                 label = 'y'\n[model]\nkind = 'linear'\n[start]\n{start}"
            ))
        };
        let spec = job("new = ['head.*']\nfile = 'a'\n[start.names]\n'*' = 'module.*'").unwrap();
        let start = spec.start.unwrap();
        assert_eq!((start.file.as_str(), start.new.len(), start.names.len()), ("a", 1, 1));
        let error = job("new = ['head.*']").unwrap_err().to_string();
        assert!(error.starts_with("`start.file` is missing"), "{error}");
        let error = job("file = 'a'\nnames = { 'a*' = 'b' }").unwrap_err().to_string();
        assert!(error.starts_with("`start.names`: `a*` = `b`"), "{error}");
    }

    #[test]
    fn a_mapping_has_one_star_on_both_sides_or_none() {
        for names in ["{ 'a*' = 'b' }", "{ 'a*b*' = 'c*d*' }"] {
            let start: StartSpec = toml::from_str(&format!("file = ''\nnames = {names}")).unwrap();
            assert_eq!(start.errors().len(), 2, "{:?}", start.errors());
        }
    }
}
