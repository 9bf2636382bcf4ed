//! The drafter as the decoding loop sees it.

use ddtree::{
    Committed, Drafter, Proposal, ProposalRequest, TopK,
    candle::{Taps, dflash::DFlash},
};
use serde_json::json;

use crate::fixture::{Array, Fixture, difference, rows};

/// The taps of `count` tokens from `first` on, committed at `start`.
fn observe(
    drafter: &mut DFlash,
    taps: &Array,
    first: usize,
    count: usize,
    start: usize,
) -> Result<(), String> {
    let tokens = vec![5; count];
    let rows = Taps::new(Some(taps.tensor().narrow(0, first, count).unwrap()));
    Drafter::observe(drafter, &Committed::new(start, &tokens), &rows)
        .map_err(|error| error.to_string())
}

#[test]
fn proposes_the_best_tokens_of_every_slot() {
    let mut model = Fixture::new(30, json!({ "block_size": 6 }));
    let taps = model.taps(9);
    let mut drafter = model.drafter();
    assert_eq!(Drafter::<Taps>::horizon(&drafter), 5);
    observe(&mut drafter, &taps, 0, 9, 0).unwrap();
    for (horizon, top_k) in [(5, 4), (2, 1), (3, 100)] {
        let mut proposal = Proposal::new();
        let request = ProposalRequest::new(7, 9, horizon, top_k);
        drafter.propose(&request, &mut proposal).unwrap();
        let logits = rows(&drafter.logits(7, 9, horizon).unwrap());
        let mut expected = Proposal::new();
        for row in &logits {
            expected.push_logits(row, top_k, &mut TopK::new()).unwrap();
        }
        assert_eq!(proposal, expected);
        assert_eq!((proposal.horizon(), proposal.depth(1).0.len()), (horizon, top_k.min(40)));
    }
}

/// Case 27: what follows a reset may begin after the rows kept. The context then begins there too:
/// it has no hole.
#[test]
fn a_reset_keeps_a_prefix_or_begins_anew() {
    let mut model = Fixture::new(31, json!({}));
    let taps = model.taps(40);
    let logits = |drafter: &mut DFlash, position| rows(&drafter.logits(7, position, 4).unwrap());
    let mut drafter = model.drafter();
    observe(&mut drafter, &taps, 0, 20, 0).unwrap();

    Drafter::<Taps>::reset(&mut drafter, 12).unwrap();
    assert_eq!(drafter.next_position(), Some(12));
    observe(&mut drafter, &taps, 12, 3, 12).unwrap();
    let mut expected = model.drafter();
    observe(&mut expected, &taps, 0, 15, 0).unwrap();
    assert!(difference(&logits(&mut drafter, 15), &logits(&mut expected, 15)) < 1e-5);
    // Without a reset the same step is a hole.
    assert!(observe(&mut drafter, &taps, 30, 5, 30).unwrap_err().contains("15"));

    Drafter::<Taps>::reset(&mut drafter, 12).unwrap();
    // An observation beyond the target's positions leaves what was kept.
    assert!(observe(&mut drafter, &taps, 30, 5, 1_000_000).is_err());
    assert_eq!((drafter.context_len(), drafter.next_position()), (12, Some(12)));
    observe(&mut drafter, &taps, 30, 5, 30).unwrap();
    let mut expected = model.drafter();
    observe(&mut expected, &taps, 30, 5, 30).unwrap();
    assert_eq!(logits(&mut drafter, 35), logits(&mut expected, 35));
    assert!(observe(&mut drafter, &taps, 36, 1, 36).is_err());

    // Nothing of the first 10 positions is there, and nothing beyond 35.
    for (keep, left) in [(100, 5), (33, 3), (10, 0)] {
        Drafter::<Taps>::reset(&mut drafter, keep).unwrap();
        assert_eq!(drafter.context_len(), left);
    }
}

#[test]
fn taps_of_another_number_of_tokens_are_errors() {
    let mut model = Fixture::new(32, json!({}));
    let taps = Taps::new(Some(model.taps(4).tensor()));
    let mut drafter = model.drafter();
    let three = Committed::new(0, &[1, 2, 3]);
    for features in [taps, Taps::new(None)] {
        let error = Drafter::observe(&mut drafter, &three, &features).unwrap_err().to_string();
        assert!(error.contains("features") && error.contains("3 committed tokens"), "{error}");
    }
    assert_eq!(drafter.context_len(), 0);
}

/// Case 12: a drafter whose arithmetic overflows is an error, not a proposal of arbitrary tokens.
#[test]
fn logits_that_are_no_numbers_are_errors() {
    let mut model = Fixture::new(33, json!({}));
    model.tensors.get_mut("norm.weight").unwrap().values[3] = f32::NAN;
    let mut drafter = model.drafter();
    let mut proposal = Proposal::new();
    let error = drafter.propose(&ProposalRequest::new(7, 0, 4, 2), &mut proposal).unwrap_err();
    let cause = std::error::Error::source(&error).expect("what is wrong with the row").to_string();
    assert!(cause.contains("NaN"), "{error}: {cause}");
}
