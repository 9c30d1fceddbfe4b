//! The state that the members share in a protocol of their own.

use super::*;

/// S002-6, S002-7: the master keeps the state; only who knows the present one, by its token, replaces it.
#[test]
fn the_shared_state_is_replaced_by_those_who_know_it() {
    let mut state = Rendezvous::default();
    let share = |state: &mut Rendezvous, token, value: &str| {
        let facts = state.share(token, value.into()).unwrap();
        facts.iter().for_each(|fact| state.evolve(fact));
        let record = state.shared().unwrap();
        (record.token, String::from_utf8(record.state.clone()).unwrap())
    };
    assert_eq!(state.shared(), None);
    assert_eq!(share(&mut state, 0, "one"), (1, "one".to_owned()));
    assert_eq!(share(&mut state, 0, "two"), (1, "one".to_owned()), "it does not know the state");
    assert_eq!(share(&mut state, 1, "two"), (2, "two".to_owned()));
    let too_large = state.share(2, vec![0; VALUE_BYTES_MAX + 1]);
    assert!(matches!(too_large, Err(Refusal::ValueTooLarge { .. })));
}
