//! `top_k` against a full sort and against log-sum-exp in f64.

use ddtree::top_k::{LogitsError, TopK, argmax, log_sum_exp};
use proptest::prelude::*;

/// Lengths on both sides of the borders of the inner loops and chunks.
const LENGTHS: [usize; 15] = [1, 2, 15, 16, 17, 31, 33, 255, 256, 257, 511, 512, 513, 2048, 4097];

/// The k largest entries by a stable sort of the whole row.
fn naive_top_k(logits: &[f32], k: usize) -> (Vec<u32>, Vec<f32>) {
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let at = |id: u32| logits[id as usize];
    ids.sort_by(|&a, &b| at(b).partial_cmp(&at(a)).unwrap());
    ids.truncate(k);
    let values = ids.iter().map(|&id| at(id)).collect();
    (ids, values)
}

fn naive_log_sum_exp(logits: &[f32]) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    if max == f64::NEG_INFINITY {
        return max;
    }
    max + logits.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln()
}

/// The bound that `log_sum_exp` documents.
fn tolerance(logits: &[f32]) -> f64 {
    6.5e-7 + 6e-8 * (logits.len() as f64).ln()
}

fn select(logits: &[f32], k: usize) -> (Vec<u32>, Vec<f32>) {
    let (mut tokens, mut values) = (Vec::new(), Vec::new());
    TopK::new().select(logits, k, &mut tokens, &mut values).unwrap();
    (tokens, values)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// All functions on one row, and `select` for every k in `ks`, against the naive answers.
fn check(logits: &[f32], ks: impl IntoIterator<Item = usize>) {
    let mut top_k = TopK::new();
    let normaliser = log_sum_exp(logits).unwrap();
    let exact = naive_log_sum_exp(logits);
    assert!(
        normaliser == exact || (normaliser - exact).abs() <= tolerance(logits),
        "log-sum-exp {normaliser}, expected {exact}"
    );
    let (best, best_value) = argmax(logits).unwrap();
    let (first, first_value) = naive_top_k(logits, 1);
    assert_eq!((best, best_value.to_bits()), (first[0], first_value[0].to_bits()));
    assert!(normaliser >= f64::from(best_value));

    for k in ks {
        let (expected, expected_values) = naive_top_k(logits, k);
        let (mut tokens, mut values) = (vec![7], vec![0.5]);
        top_k.select(logits, k, &mut tokens, &mut values).unwrap();
        assert_eq!((tokens[0], values[0]), (7, 0.5), "earlier entries changed");
        assert_eq!(tokens[1..], expected, "tokens for k = {k}");
        assert_eq!(bits(&values[1..]), bits(&expected_values), "values for k = {k}");

        let (mut tokens, mut log_probs) = (Vec::new(), Vec::new());
        top_k.top_k_log_probs(logits, k, &mut tokens, &mut log_probs).unwrap();
        assert_eq!(tokens, expected);
        let expected: Vec<f32> = expected_values
            .iter()
            .map(|&x| if x == f32::NEG_INFINITY { x } else { x - normaliser as f32 })
            .collect();
        assert_eq!(bits(&log_probs), bits(&expected), "log-probabilities for k = {k}");
        assert!(log_probs.iter().all(|&x| x <= 0.0));
    }
}

fn around(len: usize) -> Vec<usize> {
    let mut ks = vec![0, 1, 2, 3, 4, 15, 16, 17, 64, len / 2, len - 1, len, len + 1, usize::MAX];
    ks.extend([len / 128, len / 128 + 1, len / 16, len / 16 + 1]);
    ks
}

/// The entry at an index of a row of a length.
type Shape = fn(usize, usize) -> f32;

#[test]
fn shaped_rows_of_every_length() {
    for len in LENGTHS {
        let shapes: [(&str, Shape); 9] = [
            ("rising", |i, _| i as f32),
            ("falling", |i, len| (len - i) as f32 * 0.5 - 3.0),
            ("equal", |_, _| 1.25),
            ("masked", |_, _| f32::NEG_INFINITY),
            ("half masked", |i, _| if i % 2 == 0 { f32::NEG_INFINITY } else { -(i as f32) }),
            ("signed zeros", |i, _| if i % 3 == 0 { -0.0 } else { 0.0 }),
            ("one tie per chunk", |i, _| if i % 256 == 255 { 1.0 } else { 0.0 }),
            ("heavy ties", |i, _| (i * 7919 % 3) as f32),
            ("extremes", |i, _| [f32::MAX, f32::MIN, f32::MIN_POSITIVE, -1e-40][i % 4]),
        ];
        for (name, shape) in shapes {
            println!("{name}, {len} entries");
            let logits: Vec<f32> = (0..len).map(|i| shape(i, len)).collect();
            check(&logits, around(len));
        }
    }
}

#[test]
fn equal_values_come_by_lowest_id() {
    assert_eq!(select(&[1.0, 3.0, 3.0, 2.0, 3.0], 2), (vec![1, 2], vec![3.0, 3.0]));
    assert_eq!(select(&[2.0; 1000], 4).0, [0, 1, 2, 3]);
    assert_eq!(argmax(&[1.0, 3.0, 3.0]), Ok((1, 3.0)));
}

#[test]
fn zeros_of_both_signs_tie_and_keep_their_sign() {
    let (tokens, values) = select(&[-0.0, 0.0, -0.0], 3);
    assert_eq!(tokens, [0, 1, 2]);
    assert_eq!(bits(&values), bits(&[-0.0, 0.0, -0.0]));
    assert_eq!(argmax(&[-1.0, -0.0, 0.0]).map(|(id, x)| (id, x.to_bits())), Ok((1, 1 << 31)));
}

#[test]
fn masked_tokens_come_last_with_no_probability() {
    let logits = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, 0.0];
    let (mut tokens, mut log_probs) = (Vec::new(), Vec::new());
    TopK::new().top_k_log_probs(&logits, 4, &mut tokens, &mut log_probs).unwrap();
    assert_eq!(tokens, [1, 3, 0, 2]);
    assert_eq!(log_probs[..2], [-std::f32::consts::LN_2; 2]);
    assert_eq!(log_probs[2..], [f32::NEG_INFINITY; 2]);
}

#[test]
fn a_row_masked_throughout_has_no_probability() {
    let logits = [f32::NEG_INFINITY; 300];
    assert_eq!(log_sum_exp(&logits), Ok(f64::NEG_INFINITY));
    assert_eq!(argmax(&logits), Ok((0, f32::NEG_INFINITY)));
    let (mut tokens, mut log_probs) = (Vec::new(), Vec::new());
    TopK::new().top_k_log_probs(&logits, 2, &mut tokens, &mut log_probs).unwrap();
    assert_eq!((tokens, log_probs), (vec![0, 1], vec![f32::NEG_INFINITY; 2]));
}

#[test]
fn log_probs_are_normalised_over_the_whole_row() {
    let logits = [3.0; 1024];
    let (mut tokens, mut log_probs) = (Vec::new(), Vec::new());
    TopK::new().top_k_log_probs(&logits, 1, &mut tokens, &mut log_probs).unwrap();
    assert!((log_probs[0] + 1024f32.ln()).abs() < 1e-6);
}

#[test]
fn a_dominating_token_is_certain() {
    let mut logits = vec![0.0; 1000];
    logits[400] = 200.0;
    let (mut tokens, mut log_probs) = (Vec::new(), Vec::new());
    TopK::new().top_k_log_probs(&logits, 2, &mut tokens, &mut log_probs).unwrap();
    assert_eq!((tokens, log_probs), (vec![400, 0], vec![0.0, -200.0]));
}

#[test]
fn a_vocabulary_sized_row_keeps_its_digits() {
    // The worst rows for rounding: many equal small terms next to one large, so that errors add up.
    for gap in [0.0f32, 3.3, 7.7, 11.81, 12.37, 20.1] {
        let mut logits = vec![0.123; 151_936];
        logits[70_000] += gap;
        let difference = log_sum_exp(&logits).unwrap() - naive_log_sum_exp(&logits);
        assert!(difference.abs() <= tolerance(&logits), "gap {gap}: off by {difference:e}");
    }
}

/// Every function's error on a row that all of them must refuse, leaving the output alone.
fn refused(logits: &[f32]) -> LogitsError {
    let error = argmax(logits).unwrap_err();
    assert_eq!(log_sum_exp(logits), Err(error));
    let mut top_k = TopK::new();
    for k in [0, 1, 5, usize::MAX] {
        let (mut tokens, mut values) = (vec![9], vec![8.0]);
        assert_eq!(top_k.select(logits, k, &mut tokens, &mut values), Err(error));
        assert_eq!(top_k.top_k_log_probs(logits, k, &mut tokens, &mut values), Err(error));
        assert_eq!((tokens, values), (vec![9], vec![8.0]));
    }
    error
}

#[test]
fn nan_is_refused_wherever_it_is() {
    for len in LENGTHS {
        for index in [0, len / 3, len / 2, len - 1] {
            for (base, nan) in [(1.0, f32::NAN), (f32::NEG_INFINITY, -f32::NAN)] {
                let mut logits = vec![base; len];
                logits[index] = nan;
                assert_eq!(refused(&logits), LogitsError::NotANumber { index });
            }
        }
    }
}

#[test]
fn positive_infinity_is_refused_wherever_it_is() {
    for len in LENGTHS {
        for index in [0, len / 3, len / 2, len - 1] {
            let mut logits = vec![1.0; len];
            logits[index] = f32::INFINITY;
            assert_eq!(refused(&logits), LogitsError::PositiveInfinity { index });
        }
    }
}

#[test]
fn the_first_refused_entry_is_named() {
    let mut logits = vec![0.0; 600];
    logits[500] = f32::NAN;
    logits[300] = f32::INFINITY;
    assert_eq!(refused(&logits), LogitsError::PositiveInfinity { index: 300 });
    logits[20] = f32::NAN;
    let error = refused(&logits);
    assert_eq!(error, LogitsError::NotANumber { index: 20 });
    assert_eq!(error.to_string(), "logits[20] is NaN, every entry must be finite or -inf");
}

#[test]
fn an_empty_row_is_refused() {
    assert_eq!(refused(&[]), LogitsError::Empty);
}

#[test]
fn buffers_do_not_grow_with_the_values() {
    let rising: Vec<f32> = (0..5000).map(|i| i as f32).collect();
    let falling: Vec<f32> = (0..5000).map(|i| -i as f32).collect();
    let equal = vec![0.0; 5000];
    let mut top_k = TopK::new();
    assert_eq!(top_k.memory_usage(), 0);
    let (mut tokens, mut values) = (Vec::new(), Vec::new());
    top_k.select(&falling, 20, &mut tokens, &mut values).unwrap();
    let after_one = top_k.memory_usage();
    assert!(after_one > 0);
    for row in [&rising, &equal, &falling] {
        top_k.select(row, 20, &mut tokens, &mut values).unwrap();
        assert_eq!(top_k.memory_usage(), after_one);
    }
}

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![1usize..40, 200usize..1300, prop::sample::select(LENGTHS.to_vec())]
}

/// Any logit that is not refused.
fn any_logit() -> impl Strategy<Value = f32> {
    any::<u32>().prop_map(|bits| {
        let x = f32::from_bits(bits);
        if x.is_nan() || x == f32::INFINITY { f32::NEG_INFINITY } else { x }
    })
}

/// Few distinct values, so that ties are the rule.
fn tied_logit() -> impl Strategy<Value = f32> {
    prop::sample::select(vec![f32::NEG_INFINITY, -1.5, -0.0, 0.0, 0.25, 1.0])
}

fn row() -> impl Strategy<Value = Vec<f32>> {
    length().prop_flat_map(|len| {
        prop_oneof![
            prop::collection::vec(-30f32..30.0, len),
            prop::collection::vec(any_logit(), len),
            prop::collection::vec(tied_logit(), len),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_a_full_sort(logits in row(), k in 0usize..100, share in 0.0..1.1) {
        check(&logits, [k, (share * logits.len() as f64) as usize]);
    }

    #[test]
    fn one_object_serves_any_row(rows in prop::collection::vec((row(), 0usize..70), 1..5)) {
        let mut top_k = TopK::new();
        for (logits, k) in rows {
            let (mut tokens, mut values) = (Vec::new(), Vec::new());
            top_k.select(&logits, k, &mut tokens, &mut values).unwrap();
            prop_assert_eq!((tokens, values), naive_top_k(&logits, k));
        }
    }
}
