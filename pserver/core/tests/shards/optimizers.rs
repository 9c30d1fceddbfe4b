//! Update rules against reference implementations, and the properties that training relies on.

use serde::Deserialize;
use steadfast_common::job::optimizer_errors;
use steadfast_common::job::spec::{OptimizerKind, OptimizerSpec};
use steadfast_pserver_core::optimizer::{Optimizer, State};

/// The output of `data/make_reference.py`.
#[derive(Deserialize)]
struct Reference {
    params: Vec<f32>,
    gradients: Vec<Vec<f32>>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    spec: OptimizerSpec,
    rates: Vec<f32>,
    expected: Vec<f64>,
}

fn reference() -> Reference {
    serde_json::from_str(include_str!("data/optimizers.json")).unwrap()
}

/// Returns parameters and state after all gradients, applied in blocks of `len` values.
fn trained(
    spec: &OptimizerSpec,
    params: &[f32],
    gradients: &[Vec<f32>],
    rates: &[f32],
    len: usize,
) -> (Vec<f32>, Vec<Vec<f32>>) {
    let optimizer = Optimizer::new(spec);
    let mut all = params.to_vec();
    let mut states = vec![Vec::new(); optimizer.state_names().len()];
    for (index, params) in all.chunks_mut(len).enumerate() {
        let mut state = optimizer.initial_state(params);
        for (update, (gradient, rate)) in (1..).zip(gradients.iter().zip(rates)) {
            let start = index * len;
            let mut gradient = gradient[start..start + params.len()].to_vec();
            let state = State::new(&mut state, 0..params.len());
            optimizer.apply(params, &mut gradient, state, *rate, update);
        }
        states.iter_mut().zip(state).for_each(|(all, block)| all.extend(block));
    }
    (all, states)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// S004-48: the update rules required of pservers, and those that replaced them since, agree with their
/// reference implementations.
#[test]
fn each_rule_agrees_with_its_reference() {
    let Reference { params, gradients, cases } = reference();
    assert_eq!(cases.len(), 62);
    for case in cases {
        let (found, _) = trained(&case.spec, &params, &gradients, &case.rates, params.len());
        for (index, (found, expected)) in found.iter().zip(&case.expected).enumerate() {
            let error = (f64::from(*found) - expected).abs();
            // A value that ends near zero keeps the rounding error of its initial magnitude.
            let allowed = 1e-6 * expected.abs().max(f64::from(params[index].abs()));
            assert!(error <= allowed, "{:?}, value {index}: {found}, not {expected}", case.spec);
        }
    }
}

/// S004-48: the references use only settings that the job file allows.
#[test]
fn the_references_have_no_fault() {
    for case in reference().cases {
        assert_eq!(optimizer_errors::optimizer(&case.spec), []);
    }
}

/// S004-48: any number of pservers gives the same parameters.
#[test]
fn the_result_does_not_depend_on_how_parameters_are_cut() {
    let Reference { params, gradients, cases } = reference();
    // Wider than any vector unit, and not a multiple of its width.
    let params = params.repeat(9);
    let gradients: Vec<Vec<f32>> = gradients.iter().map(|gradient| gradient.repeat(9)).collect();
    // Rules with norms need a parameter as a whole.
    for case in cases.into_iter().filter(|case| !case.spec.needs_whole_parameters()) {
        let train = |len| trained(&case.spec, &params, &gradients, &case.rates, len);
        let (whole, whole_state) = train(params.len());
        for len in [1, 2, 7, 16, 33, 98] {
            let (snapshot, cut_state) = train(len);
            assert_eq!(bits(&snapshot), bits(&whole), "{:?} in blocks of {len}", case.spec);
            for (snapshot, whole) in cut_state.iter().zip(&whole_state) {
                assert_eq!(bits(snapshot), bits(whole), "{:?} in blocks of {len}", case.spec);
            }
        }
    }
}

/// S004-48: a checkpoint holds the complete state.
#[test]
fn training_goes_on_from_a_saved_state_with_the_same_bits() {
    let Reference { params, gradients, cases } = reference();
    for case in cases {
        let (whole, _) = trained(&case.spec, &params, &gradients, &case.rates, params.len());
        let (mut half, mut state) =
            trained(&case.spec, &params, &gradients[..5], &case.rates[..5], params.len());
        let restored = Optimizer::new(&case.spec);
        for (update, (gradient, rate)) in (1..).zip(gradients.iter().zip(&case.rates)).skip(5) {
            let state = State::new(&mut state, 0..params.len());
            restored.apply(&mut half, &mut gradient.clone(), state, *rate, update);
        }
        assert_eq!(bits(&half), bits(&whole), "{:?}", case.spec);
    }
}

/// S004-48: without regularisation, FTRL is gradient descent with a rate per value (McMahan et al. 2013),
/// so a changed rate alone must not move parameters.
#[test]
fn ftrl_without_regularisation_is_descent_also_when_the_rate_changes() {
    let Reference { params, gradients, .. } = reference();
    let spec: OptimizerSpec =
        serde_json::from_str(r#"{"kind": "ftrl", "initial_accumulator": 0.1}"#).unwrap();
    let rates: Vec<f32> = (0..12).map(|update| 0.1 / (1.0 + update as f32)).collect();
    let (found, _) = trained(&spec, &vec![0.0; params.len()], &gradients, &rates, params.len());
    for (index, found) in found.into_iter().enumerate() {
        let (mut squares, mut expected) = (0.1, 0.0);
        for (gradient, rate) in gradients.iter().zip(&rates) {
            let gradient = f64::from(gradient[index]);
            squares += gradient * gradient;
            expected -= f64::from(*rate) * gradient / squares.sqrt();
        }
        assert!((f64::from(found) - expected).abs() < 1e-6, "{found}, not {expected}");
    }
}

/// S004-48: built-in rules that are written as texts give their results, up to the last bits of `f32`.
#[test]
fn a_text_agrees_with_the_built_in_rule() {
    let Reference { params, gradients, .. } = reference();
    let texts = [
        ("sgd", "p -= lr*g", &[][..]),
        ("momentum", "velocity = 0.9*velocity + g; p -= lr*velocity", &["velocity"]),
        ("lion", "c = 0.9*m + 0.1*g; m = 0.99*m + 0.01*g; p -= lr*sign(c)", &["m"]),
        ("rmsprop", "n = 0.99*n + 0.01*g**2; p -= lr*g/(sqrt(n) + 1e-8)", &["n"]),
        // A state keeps the parameter of before the update.
        ("sgd", "q = p; p = q - lr*g + 0*before; before = q", &["before"]),
        ("sgd", "n = norm(p)/norm(p); p -= lr*n*g", &[]),
    ];
    let rates = vec![0.1; gradients.len()];
    for (kind, rule, states) in texts {
        let built_in: OptimizerSpec =
            serde_json::from_value(serde_json::json!({ "kind": kind })).unwrap();
        let text = serde_json::json!({ "kind": "rule", "rule": rule, "states": states });
        let text: OptimizerSpec = serde_json::from_value(text).unwrap();
        let (expected, _) = trained(&built_in, &params, &gradients, &rates, params.len());
        let (found, _) = trained(&text, &params, &gradients, &rates, params.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() <= 2e-6 * expected.abs().max(1.0), "{rule}");
        }
    }
}

/// Applies a text without states once, with a rate of 0.5, as the third update.
fn apply(rule: &str, params: &[f32], gradient: &[f32]) -> Vec<f32> {
    let spec = serde_json::json!({ "kind": "rule", "rule": rule });
    let optimizer = Optimizer::new(&serde_json::from_value(spec).unwrap());
    let (mut params, mut gradient) = (params.to_vec(), gradient.to_vec());
    let state = State::new(&mut [], 0..gradient.len());
    optimizer.apply(&mut params, &mut gradient, state, 0.5, 3);
    params
}

/// I7: products and sums with numbers, which no loop of their own computes, are rounded as they are written, and zeros
/// keep their signs.
#[test]
fn a_text_has_the_bits_of_its_formula() {
    type Formula = fn(f32, f32) -> f32;
    let formulas: &[(&str, Formula)] = &[
        ("p = -p", |p, _| -p),
        ("p = p + 0", |p, _| p + 0.0),
        ("p = 0 - p", |p, _| 0.0 - p),
        ("p = p - 1.1", |p, _| p - 1.1),
        ("p = -(p - 1)", |p, _| -(p - 1.0)),
        ("p = -(1 - p)", |p, _| -(1.0 - p)),
        ("p = 1 - -p", |p, _| 1.0 - -p),
        ("p = 0.1 - 0.3*p", |p, _| 0.1 - 0.3 * p),
        ("p = (0.3*p)*0.7", |p, _| 0.3 * p * 0.7),
        ("p = (p + 0.1)*0.7 - 0.3", |p, _| (p + 0.1) * 0.7 - 0.3),
        ("p = (p + 0.1) + 0.3", |p, _| p + 0.1 + 0.3),
        ("p = 0.3*p - 0.7*g", |p, g| 0.3 * p - 0.7 * g),
        ("p = -(0.3*p) / (0.1 + -g)", |p, g| -(0.3 * p) / (0.1 + -g)),
        ("p = max(-p, 0.5*g) - (p + 1)", |p, g| (-p).max(0.5 * g) - (p + 1.0)),
        ("p = where(p < 0.5*g, 1 - p, -g)", |p, g| if p < 0.5 * g { 1.0 - p } else { -g }),
        ("p = sqrt(0.3*p*p + 0.1)", |p, _| (0.3 * p * p + 0.1).sqrt()),
    ];
    let special = [0.0, -0.0, 1.0, -1.0, f32::MIN_POSITIVE / 3.0, f32::INFINITY, 1e30, -7.7];
    // More than a tile, and not a multiple of it.
    let params: Vec<f32> =
        special.into_iter().chain((0..93).map(|it| (it as f32 * 0.37).sin())).collect();
    let gradient: Vec<f32> = (0..params.len()).map(|it| (it as f32 * 0.77).cos()).collect();
    for (rule, formula) in formulas {
        let expected: Vec<f32> =
            params.iter().zip(&gradient).map(|(p, g)| formula(*p, *g)).collect();
        assert_eq!(bits(&apply(rule, &params, &gradient)), bits(&expected), "{rule}");
    }
}

/// S004-48: vectors in a text are computed value by value, whatever their length.
#[test]
fn conditions_and_functions_of_a_text_apply_value_by_value() {
    let (params, gradient) = ([1.0, -2.0, 3.0, -4.0, 0.0], [2.0, 0.5, -1.0, f32::NAN, 0.0]);
    assert_eq!(apply("p = where(g > 1, p, -p)", &params, &gradient), [1.0, 2.0, -3.0, 4.0, 0.0]);
    assert_eq!(apply("p = where(t == 3, 7, p)", &params, &gradient), [7.0; 5]);
    assert_eq!(apply("p = clip(p, -lr, 1)", &params, &gradient), [1.0, -0.5, 1.0, -0.5, 0.0]);
    let found = apply("p = max(g, abs(p)) + min(p, 0)", &params, &gradient);
    assert_eq!((&found[..3], found[4]), (&[2.0, 0.0, 3.0][..], 0.0));
    assert!(found[3].is_nan(), "a NaN is not hidden");
    assert_eq!(apply("p = sign(p)*t**2 + p**2", &params, &gradient), [10.0, -5.0, 18.0, 7.0, 0.0]);
    let halves = apply("p = p/norm(p)", &[0.6; 1000], &[0.0; 1000]);
    assert!(halves.iter().all(|it| (it - 1.0 / 1000.0_f32.sqrt()).abs() < 1e-8));
}

#[test]
fn a_rate_of_zero_leaves_parameters_as_they_are() {
    let Reference { params, gradients, cases } = reference();
    // The velocity of LARS has the rates of former steps, and so has the step of Rprop.
    let has_rates = |spec: &OptimizerSpec| {
        spec.kind == OptimizerKind::Lars || spec.states.contains(&"step".to_owned())
    };
    for case in cases.into_iter().filter(|case| !has_rates(&case.spec)) {
        let optimizer = Optimizer::new(&case.spec);
        let mut state = optimizer.initial_state(&params);
        let mut at = params.clone();
        let mut apply = |at: &mut [f32], gradient: &[f32], rate, update| {
            let state = State::new(&mut state, 0..at.len());
            optimizer.apply(at, &mut gradient.to_vec(), state, rate, update);
        };
        apply(&mut at, &gradients[0], 0.1, 1);
        let before = at.clone();
        apply(&mut at, &gradients[1], 0.0, 2);
        assert_eq!(bits(&at), bits(&before), "{:?}", case.spec);
    }
}

#[test]
fn a_state_has_one_vector_for_each_name() {
    for case in reference().cases {
        let optimizer = Optimizer::new(&case.spec);
        let state = optimizer.initial_state(&[1.0; 5]);
        assert_eq!(state.len(), optimizer.state_names().len());
        assert!(state.iter().all(|vector| vector.len() == 5));
    }
}

#[test]
#[should_panic(expected = "a gradient is as long as its block")]
fn a_gradient_of_another_block_is_not_applied() {
    let optimizer = Optimizer::new(&OptimizerSpec::default());
    optimizer.apply(&mut [0.0; 3], &mut [0.0; 2], State::new(&mut [], 0..3), 0.1, 1);
}
