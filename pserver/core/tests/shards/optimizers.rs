//! Update rules against reference implementations, and the properties that training relies on.

use serde::Deserialize;
use steadfast_common::job::optimizer_errors;
use steadfast_common::job::spec::OptimizerSpec;
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
    assert_eq!(cases.len(), 49);
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
    for case in cases {
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

#[test]
fn a_rate_of_zero_leaves_parameters_as_they_are() {
    let Reference { params, gradients, cases } = reference();
    for case in cases {
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
