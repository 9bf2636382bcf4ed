//! The checks, in the order of a report. Where a fault has a symptom of its own,
//! the check is an experiment on that symptom and comes before the general
//! comparison that the fault would fail as well.

use super::{
    Check, Finding, Outcome, Report, Verdict,
    lab::{Found, Lab, Pick, describe, grow, path_tokens},
};
use crate::{Capabilities, DraftTree, Stage, Verifier};

/// A check of a verifier; what it returns early is why it does not apply.
type Run<'k, V> = fn(&mut Lab<'k, V>) -> Found<Result<(), &'static str>>;

pub(super) fn run<V: Verifier>(mut lab: Lab<'_, V>) -> Report {
    let checks: [(Check, Run<'_, V>); 23] = [
        (Check::PrefillRepeats, prefill_repeats),
        (Check::Reset, reset),
        (Check::PrefillSplit, prefill_split),
        (Check::FreshPicks, fresh_picks),
        (Check::LoneRoot, lone_root),
        (Check::ChainEqualsPlain, chain_equals_plain),
        (Check::SiblingsDoNotSeeEachOther, siblings_do_not_see_each_other),
        (Check::PositionsFollowDepth, positions_follow_depth),
        (Check::TokenZero, token_zero),
        (Check::EqualTokens, equal_tokens),
        (Check::TreeEqualsPaths, tree_equals_paths),
        (Check::UnwantedSlots, unwanted_slots),
        (Check::BonusNotKept, bonus_not_kept),
        (Check::CommitPrefix, commit_prefix),
        (Check::ZeroAcceptance, zero_acceptance),
        (Check::CommitScatteredPath, commit_scattered_path),
        (Check::FeaturesByPath, features_by_path),
        (Check::RepeatedVerify, repeated_verify),
        (Check::PrefillAfterRounds, prefill_after_rounds),
        (Check::ResetToPrefix, reset_to_prefix),
        (Check::ErrorRecovery, error_recovery),
        (Check::LongRun, long_run),
        (Check::FullCache, full_cache),
    ];
    let Capabilities { max_len, vocab_size, max_slots, .. } = lab.capabilities;
    let too_small = max_len < 40 || vocab_size < 8 || max_slots == 0;
    let outcomes = checks.into_iter().map(|(check, run)| {
        lab.begin(check as usize);
        let result = if too_small {
            Ok(Err("the verifier has fewer than 40 rows, 8 tokens or 1 slot"))
        } else {
            run(&mut lab)
        };
        let verdict = match result {
            Ok(Ok(())) if lab.comparisons == 0 => Verdict::Skipped("nothing was compared"),
            Ok(Ok(())) => Verdict::Passed,
            Ok(Err(why)) => Verdict::Skipped(why),
            Err(finding) => Verdict::Failed(*finding),
        };
        let (comparisons, near_ties) = (lab.comparisons, lab.near_ties);
        Outcome { check, verdict, comparisons, near_ties }
    });
    Report { outcomes: outcomes.collect() }
}

/// Leaves a check that needs trees where there can be none.
macro_rules! need_trees {
    ($lab:expr) => {
        if let Err(why) = $lab.trees() {
            return Ok(Err(why));
        }
    };
}

fn prefill_repeats<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    for _ in 0..lab.kit.trials {
        let context = lab.context();
        // What a reset might leave behind is the same for both of these.
        lab.plain(&context)?;
        let expected = lab.plain(&context)?;
        let found = lab.plain(&context)?;
        lab.compare(&[expected], &[found], || format!("prefill of {context:?}, once more"))?;
    }
    Ok(Ok(()))
}

fn reset<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    for _ in 0..lab.kit.trials {
        let (context, other, chain) = (lab.context(), lab.context(), lab.chain(3));
        let expected = lab.plain(&context)?;
        // Longer than the context, and with a verification left open.
        lab.fresh(&[&other[..], &context].concat())?;
        lab.verify(other.len() + context.len(), &chain)?;
        let found = lab.plain(&context)?;
        lab.compare(&[expected], &[found], || {
            format!("prefill of {context:?} after a reset from a longer text")
        })?;
    }
    Ok(Ok(()))
}

fn prefill_split<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    for _ in 0..lab.kit.trials {
        let context = lab.context();
        let at = 1 + lab.below(context.len() - 1);
        let expected = lab.plain(&context)?;
        lab.fresh(&context[..at])?;
        let (found, _) = lab.prefill(at, &context[at..])?;
        lab.compare(&[expected], &[found], || format!("prefill of {context:?} in two, at {at}"))?;
    }
    Ok(Ok(()))
}

/// Two verifications in a row. A fault only if whatever is wrong with the second
/// one's picks is that they belong to the first: other differences have checks of
/// their own.
fn fresh_picks<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    let mut finding = None;
    let mut all_stale = true;
    for _ in 0..2 * lab.kit.trials {
        let context = lab.context();
        let (first, second) = (lab.chain(1), lab.chain(1));
        let of_first = lab.plain_tree(&context, &first)?;
        let expected = lab.plain_tree(&context, &second)?;
        lab.fresh(&context)?;
        let before = lab.verify(context.len(), &first)?;
        let found = lab.verify(context.len(), &second)?;
        let result = lab.compare(&expected, &found, || {
            let root = first.tokens()[0];
            format!("{}, after root {root} was verified", describe(&context, &second))
        });
        if let Err(wrong) = result {
            all_stale &= lab.is_same(of_first[0], found[0]) || lab.is_same(before[0], found[0]);
            finding.get_or_insert(wrong);
        }
    }
    match finding {
        Some(finding) if all_stale => Err(finding),
        _ => Ok(Ok(())),
    }
}

/// Compares the picks of a tree with those of its paths.
fn check_tree<V: Verifier>(lab: &mut Lab<'_, V>, context: &[u32], tree: &DraftTree) -> Found<()> {
    let expected = lab.plain_tree(context, tree)?;
    lab.fresh(context)?;
    let found = lab.verify(context.len(), tree)?;
    lab.compare(&expected, &found, || describe(context, tree))
}

/// The same for one wide tree, at some of its slots.
fn check_wide<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<()> {
    let context = lab.context();
    let Some(tree) = lab.wide_tree() else { return Ok(()) };
    let slots = lab.some_slots(&tree);
    let expected = lab.plain_slots(&context, &tree, &slots)?;
    lab.fresh(&context)?;
    let found = lab.verify(context.len(), &tree)?;
    for (slot, expected) in slots.into_iter().zip(expected) {
        lab.compare_at(slot, expected, found[slot], || describe(&context, &tree))?;
    }
    Ok(())
}

fn lone_root<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    for _ in 0..lab.kit.trials {
        let (context, root) = (lab.context(), lab.chain(1));
        check_tree(lab, &context, &root)?;
    }
    Ok(Ok(()))
}

fn chain_equals_plain<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    for slots in 2..2 + lab.kit.trials {
        let (context, chain) = (lab.context(), lab.chain(slots));
        check_tree(lab, &context, &chain)?;
    }
    if lab.trees().is_err() {
        check_wide(lab)?;
    }
    Ok(Ok(()))
}

/// Changes one token at a time; picks outside the subtree below it must not
/// change.
fn siblings_do_not_see_each_other<V: Verifier>(
    lab: &mut Lab<'_, V>,
) -> Found<Result<(), &'static str>> {
    need_trees!(lab);
    for _ in 0..lab.kit.trials {
        let (context, tree) = (lab.context(), lab.random_tree());
        lab.fresh(&context)?;
        let before = lab.verify(context.len(), &tree)?;
        for changed in 1..tree.len() {
            let mut tokens = tree.tokens().to_vec();
            tokens[changed] = lab.token(&tokens);
            let other = grow(&tokens, tree.parents());
            let mut after = lab.verify(context.len(), &other)?;
            for slot in 0..tree.len() {
                if tree.ancestors(slot).any(|above| above == changed) {
                    after[slot] = before[slot];
                }
            }
            lab.compare(&before, &after, || {
                let token = tokens[changed];
                format!("{}, slot {changed} changed to token {token}", describe(&context, &tree))
            })?;
        }
    }
    Ok(Ok(()))
}

/// One path, with and without other nodes before its slots.
fn positions_follow_depth<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    need_trees!(lab);
    for _ in 0..lab.kit.trials {
        let context = lab.context();
        // The path is slots 3 and 5 here; alone, it is slots 1 and 2.
        let tree = lab.tree(&[-1, 0, 0, 0, 1, 3]);
        let alone = grow(&path_tokens(&tree, 5), &[-1, 0, 1]);
        lab.fresh(&context)?;
        let expected = lab.verify(context.len(), &alone)?;
        let found = lab.verify(context.len(), &tree)?;
        let found = [found[0], found[3], found[5]];
        lab.compare(&expected, &found, || {
            format!("{}, path of slots 0, 3, 5 against the path alone", describe(&context, &tree))
        })?;
    }
    Ok(Ok(()))
}

fn token_zero<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    let mut shapes = vec![vec![-1, 0, 1]];
    if lab.trees().is_ok() {
        shapes.extend([vec![-1, 0, 0, 1], vec![-1, 0, 1, 0, 3, 2]]);
    }
    for mut parents in shapes {
        parents.truncate(lab.max_slots());
        for zero in 0..parents.len() {
            let context = lab.context();
            let mut tokens = lab.tree(&parents).tokens().to_vec();
            tokens[zero] = 0;
            check_tree(lab, &context, &grow(&tokens, &parents))?;
        }
    }
    Ok(Ok(()))
}

fn equal_tokens<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    need_trees!(lab);
    for _ in 0..lab.kit.trials {
        let (context, distinct) = (lab.context(), lab.tree(&[-1, 0, 0, 1, 2, 3]));
        let mut tokens = distinct.tokens().to_vec();
        // Cousins, and a node like its parent.
        tokens[4] = tokens[3];
        tokens[5] = tokens[3];
        check_tree(lab, &context, &grow(&tokens, distinct.parents()))?;
    }
    Ok(Ok(()))
}

fn tree_equals_paths<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    need_trees!(lab);
    for _ in 0..2 * lab.kit.trials {
        let (context, tree) = (lab.context(), lab.random_tree());
        check_tree(lab, &context, &tree)?;
    }
    check_wide(lab)?;
    Ok(Ok(()))
}

/// A tree that the picks lead through, with nodes between those of the path.
fn unwanted_slots<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    need_trees!(lab);
    for _ in 0..lab.kit.trials {
        let (context, mut tree) = (lab.context(), lab.chain(1));
        let mut tip = 0;
        for _ in 0..2 {
            let path = path_tokens(&tree, tip);
            let next = lab.plain(&[&context[..], &path].concat())?.token;
            // A node that the picks do not lead to, and one that they do.
            let wrong = lab.token(&[next]);
            let pushed = tree.push(tip, wrong, 0.0).and_then(|_| tree.push(tip, next, 0.0));
            tip = pushed.unwrap_or(tip);
        }
        lab.fresh(&context)?;
        let expected = lab.verify(context.len(), &tree)?;
        let found = lab.verify_wanted(&context, &tree)?;
        let experiment =
            || format!("{}, with slots off the path skipped", describe(&context, &tree));
        let mut on_path = 0;
        for slot in 0..tree.len() {
            let is_next = slot == on_path;
            if is_next && found[slot].is_none() {
                let place = format!("{}, slot {slot}", experiment());
                let (expected, found) = (expected[slot].token.to_string(), "no pick".into());
                return Err(Box::new(Finding::Value { place, expected, found }));
            }
            if let Some(found) = found[slot] {
                lab.compare_at(slot, expected[slot], found, experiment)?;
                if is_next {
                    on_path = tree.child(slot, found.token).unwrap_or(tree.len());
                }
            }
        }
    }
    Ok(Ok(()))
}

/// What the verifier picks after the path to slot `last` of `tree` is committed.
fn probe_committed<V: Verifier>(
    lab: &mut Lab<'_, V>,
    context: &[u32],
    tree: &DraftTree,
    last: usize,
    probes: &[DraftTree],
) -> Found<Vec<Pick>> {
    lab.fresh(context)?;
    lab.verify(context.len(), tree)?;
    lab.commit(context.len(), tree, last)?;
    lab.probe(context.len() + tree.depths()[last] as usize + 1, probes)
}

/// Compares what a commit left with a prefill of the same tokens.
fn check_commit<V: Verifier>(
    lab: &mut Lab<'_, V>,
    context: &[u32],
    tree: &DraftTree,
    last: usize,
) -> Found<()> {
    let probes = lab.probes();
    let text = [context, &path_tokens(tree, last)].concat();
    let expected = lab.probe_plain(&text, &probes)?;
    let found = probe_committed(lab, context, tree, last, &probes)?;
    lab.compare(&expected, &found, || committed(context, tree, last))
}

fn committed(context: &[u32], tree: &DraftTree, last: usize) -> String {
    let mut path: Vec<usize> = tree.ancestors(last).collect();
    path.reverse();
    format!("{}, slots {path:?} committed, trees verified after it", describe(context, tree))
}

/// What follows a commit must not depend on tokens that were rejected. At least
/// one node is accepted: nothing accepted is [`zero_acceptance`].
fn bonus_not_kept<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    if lab.max_slots() < 4 {
        return Ok(Err("the verifier takes fewer than 4 slots"));
    }
    for _ in 0..lab.kit.trials {
        let (context, probes, chain) = (lab.context(), lab.probes(), lab.chain(4));
        let mut tokens = chain.tokens().to_vec();
        for rejected in 2..4 {
            tokens[rejected] = lab.token(&tokens);
        }
        let other = grow(&tokens, chain.parents());
        let expected = probe_committed(lab, &context, &chain, 1, &probes)?;
        let found = probe_committed(lab, &context, &other, 1, &probes)?;
        lab.compare(&expected, &found, || {
            let rejected = &tokens[2..];
            format!("{}, rejected tokens changed to {rejected:?}", committed(&context, &chain, 1))
        })?;
    }
    Ok(Ok(()))
}

fn commit_prefix<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    for slots in 1..2 + lab.kit.trials {
        let (context, chain) = (lab.context(), lab.chain(slots));
        // The lone root, then all but the last node, then all nodes.
        for last in chain.len().saturating_sub(2).max(chain.nodes().min(1))..chain.len() {
            check_commit(lab, &context, &chain, last)?;
        }
    }
    Ok(Ok(()))
}

fn zero_acceptance<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    for _ in 0..lab.kit.trials {
        let (context, chain) = (lab.context(), lab.chain(4));
        check_commit(lab, &context, &chain, 0)?;
        if lab.trees().is_ok() {
            let tree = lab.random_tree();
            check_commit(lab, &context, &tree, 0)?;
        }
    }
    Ok(Ok(()))
}

/// A tree and a slot whose path is not the leading slots.
fn scattered<V: Verifier>(lab: &mut Lab<'_, V>) -> (DraftTree, usize) {
    let tree = lab.random_tree();
    // Slot 2 is the root's second child.
    let mut last = 2;
    while let Some(child) = tree.children(last).last() {
        last = child;
    }
    (tree, last)
}

fn commit_scattered_path<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    need_trees!(lab);
    for _ in 0..2 * lab.kit.trials {
        let context = lab.context();
        let (tree, last) = scattered(lab);
        check_commit(lab, &context, &tree, last)?;
    }
    let context = lab.context();
    if let Some(tree) = lab.wide_tree() {
        let last =
            (tree.len().saturating_sub(8)..tree.len()).max_by_key(|&slot| tree.depths()[slot]);
        check_commit(lab, &context, &tree, last.unwrap_or(0))?;
    }
    Ok(Ok(()))
}

fn features_by_path<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    let Some(mut rows) = lab.kit.rows.take() else {
        return Ok(Err("features are not compared: see Kit::features"));
    };
    for trial in 0..2 * lab.kit.trials {
        let context = lab.context();
        let (tree, last) = match lab.trees() {
            Ok(()) if trial % 2 == 0 => scattered(lab),
            _ => (lab.chain(4), lab.below(4.min(lab.max_slots()))),
        };
        let path = path_tokens(&tree, last);
        lab.reset(0)?;
        let (_, features) = lab.prefill(0, &[&context[..], &path].concat())?;
        let expected = rows(&features);
        let place = || "feature rows of a prefill".into();
        check_count(place, context.len() + path.len(), expected.len())?;
        lab.fresh(&context)?;
        lab.verify(context.len(), &tree)?;
        let found = rows(&lab.commit(context.len(), &tree, last)?);
        let experiment = || committed(&context, &tree, last);
        check_count(|| format!("{}, feature rows", experiment()), path.len(), found.len())?;
        for (row, (expected, found)) in expected[context.len()..].iter().zip(&found).enumerate() {
            lab.comparisons += 1;
            check_count(
                || format!("{}, feature columns", experiment()),
                expected.len(),
                found.len(),
            )?;
            for (column, (&expected, &found)) in expected.iter().zip(found).enumerate() {
                let scale = expected.abs().max(found.abs()).max(1.0);
                // Also refuses NaN.
                let close = (expected - found).abs() <= lab.kit.feature_tolerance * scale;
                if !close {
                    let experiment = experiment();
                    let finding = Finding::Feature { experiment, row, column, expected, found };
                    return Err(Box::new(finding));
                }
            }
        }
    }
    Ok(Ok(()))
}

fn check_count(place: impl Fn() -> String, expected: usize, found: usize) -> Found<()> {
    if expected == found {
        return Ok(());
    }
    let (expected, found) = (expected.to_string(), found.to_string());
    Err(Box::new(Finding::Value { place: place(), expected, found }))
}

fn repeated_verify<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    for _ in 0..lab.kit.trials {
        let (context, probes) = (lab.context(), lab.probes());
        let [first, second] = lab.probes();
        let last = second.len() - 1;
        let text = [&context[..], &path_tokens(&second, last)].concat();
        let expected = lab.probe_plain(&text, &probes)?;
        lab.fresh(&context)?;
        let once = lab.verify(context.len(), &first)?;
        lab.verify(context.len(), &second)?;
        let again = lab.verify(context.len(), &first)?;
        lab.compare(&once, &again, || {
            format!("{}, again after another tree", describe(&context, &first))
        })?;
        lab.verify(context.len(), &second)?;
        lab.commit(context.len(), &second, last)?;
        let found = lab.probe(text.len(), &probes)?;
        lab.compare(&expected, &found, || {
            format!("{}, other trees verified before it", committed(&context, &second, last))
        })?;
    }
    Ok(Ok(()))
}

fn prefill_after_rounds<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    for _ in 0..lab.kit.trials {
        let (context, probes, chain, more) =
            (lab.context(), lab.probes(), lab.chain(4), lab.context());
        let text = [&context[..], &path_tokens(&chain, 1.min(chain.nodes())), &more].concat();
        let expected = lab.plain(&text)?;
        let expected_after = lab.probe(text.len(), &probes)?;
        lab.fresh(&context)?;
        lab.verify(context.len(), &chain)?;
        lab.commit(context.len(), &chain, 1.min(chain.nodes()))?;
        let (found, _) = lab.prefill(text.len() - more.len(), &more)?;
        let found_after = lab.probe(text.len(), &probes)?;
        let experiment =
            || format!("{}, then a prefill of {more:?}", committed(&context, &chain, 1));
        lab.compare(&[expected], &[found], experiment)?;
        lab.compare(&expected_after, &found_after, experiment)?;
    }
    Ok(Ok(()))
}

fn reset_to_prefix<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    for _ in 0..lab.kit.trials {
        let (context, more) = (lab.context(), lab.context());
        let keep = 1 + lab.below(context.len() - 1);
        let expected = lab.plain(&[&context[..keep], &more].concat())?;
        lab.fresh(&context)?;
        if lab.reset(keep).is_err() {
            return Ok(Err("the verifier cannot go back to a length"));
        }
        let (found, _) = lab.prefill(keep, &more)?;
        lab.compare(&[expected], &[found], || {
            format!("after {context:?}, reset to {keep} rows, prefill of {more:?}")
        })?;
    }
    Ok(Ok(()))
}

/// A prefill whose pick is refused commits nothing. False if the verifier hands over
/// token ids, which are not refused.
fn refused_pick<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<bool> {
    if !lab.capabilities.logits {
        return Ok(false);
    }
    for _ in 0..lab.kit.trials {
        let (context, refused, more) = (lab.context(), lab.context(), lab.context());
        let expected = lab.plain(&[&context[..], &more].concat())?;
        lab.fresh(&context)?;
        if !lab.refused_prefill(&context, &refused)? {
            return Ok(false);
        }
        let (found, _) = lab.prefill(context.len(), &more)?;
        lab.compare(&[expected], &[found], || {
            format!(
                "after {context:?}, prefill of {more:?} after one of {refused:?} had its pick refused"
            )
        })?;
    }
    Ok(true)
}

fn error_recovery<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    let was_refused = refused_pick(lab)?;
    if lab.kit.inject.is_none() && was_refused {
        return Ok(Ok(()));
    }
    if lab.kit.inject.is_none() {
        return Ok(Err("no errors are injected: see Kit::inject"));
    }
    for trial in 0..3 * lab.kit.trials {
        let (context, probes, more) = (lab.context(), lab.probes(), lab.context());
        let (tree, last) = match lab.trees() {
            Ok(()) => scattered(lab),
            Err(_) => (lab.chain(4), 1.min(lab.max_slots() - 1)),
        };
        let start = context.len();
        let text = [&context[..], &path_tokens(&tree, last), &more].concat();
        let picks = lab.plain_tree(&context, &tree)?;
        let expected = lab.probe_plain(&text, &probes)?;
        let stage = [Stage::Verify, Stage::Commit, Stage::Prefill][trial % 3];
        let experiment = || format!("{}, retried after {stage} failed", describe(&context, &tree));

        lab.fresh(&context)?;
        if stage == Stage::Verify {
            lab.inject(stage);
            must_fail(lab.verify(start, &tree), "verify")?;
        }
        let mut found = lab.verify(start, &tree)?;
        if stage == Stage::Commit {
            lab.inject(stage);
            must_fail(lab.commit(start, &tree, last), "commit")?;
            found = lab.verify(start, &tree)?;
        }
        lab.compare(&picks, &found, experiment)?;
        lab.commit(start, &tree, last)?;
        if stage == Stage::Prefill {
            lab.inject(stage);
            must_fail(lab.prefill(text.len() - more.len(), &more), "prefill")?;
        }
        lab.prefill(text.len() - more.len(), &more)?;
        let found = lab.probe(text.len(), &probes)?;
        lab.compare(&expected, &found, experiment)?;
    }
    Ok(Ok(()))
}

fn must_fail<T>(result: Found<T>, call: &'static str) -> Found<()> {
    match result {
        Ok(_) => Err(Box::new(Finding::NoError { call })),
        Err(_) => Ok(()),
    }
}

/// Rounds with trees that hold some of the true continuation, against a text that
/// was decoded token by token. Ends early at a near-tie, after which texts may
/// differ.
fn long_run<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    let prompt = lab.context();
    let room = lab.capabilities.max_len - prompt.len() - lab.max_slots();
    let len = lab.kit.text_len.min(room);
    lab.reset(0)?;
    let mut expected = vec![lab.prefill(0, &prompt)?.0];
    while expected.len() < len {
        let last = expected[expected.len() - 1].token;
        expected.push(lab.prefill(prompt.len() + expected.len() - 1, &[last])?.0);
    }

    lab.reset(0)?;
    let mut found = vec![lab.prefill(0, &prompt)?.0];
    lab.compare(&expected[..1], &found, || format!("first token after {prompt:?}"))?;
    while found.len() < len && lab.near_ties == 0 {
        let tree = informed_tree(lab, &expected[found.len() - 1..]);
        let start = prompt.len() + found.len() - 1;
        let picks = lab.verify(start, &tree)?;
        let mut last = 0;
        let mut new = vec![picks[0]];
        while let Some(child) = tree.child(last, picks[last].token) {
            last = child;
            new.push(picks[last]);
        }
        lab.commit(start, &tree, last)?;
        let known = &expected[found.len()..];
        lab.compare(known, &new, || {
            let at = found.len();
            format!("long run from {prompt:?}, from token {at} on, {}", describe(&[], &tree))
        })?;
        found.extend(new);
    }
    Ok(Ok(()))
}

/// A tree (or chain) below the first token of `text` in which every node has some
/// chance to be the text's.
fn informed_tree<V: Verifier>(lab: &mut Lab<'_, V>, text: &[Pick]) -> DraftTree {
    let mut tree = DraftTree::new(text[0].token);
    let chain = lab.trees().is_err();
    let slots = 1 + lab.below(lab.max_slots());
    let mut right = 0;
    while tree.len() < slots {
        let depth = tree.depths()[right] as usize;
        let tip = tree.len() - 1;
        // A node of the text, or a wrong one somewhere.
        let node = match text.get(depth + 1) {
            Some(next) if lab.below(3) > 0 && (!chain || right == tip) => (right, next.token),
            _ => (if chain { tip } else { lab.below(tree.len()) }, lab.token(&[])),
        };
        // A sibling may have the token already.
        let Ok(slot) = tree.push(node.0, node.1, 0.0) else { break };
        if node.0 == right && text.get(depth + 1).is_some_and(|next| next.token == node.1) {
            right = slot;
        }
    }
    tree
}

/// Rounds and prefills that end at the last row of the cache.
fn full_cache<V: Verifier>(lab: &mut Lab<'_, V>) -> Found<Result<(), &'static str>> {
    let rows = lab.capabilities.max_len;
    if rows > lab.kit.fill {
        return Ok(Err("the cache has more rows than are filled: see Kit::fill"));
    }
    // The last slot sees the row before its own, and its path alone is two rows shorter than the tree.
    let has_trees = lab.trees().is_ok();
    let tree = if has_trees { lab.tree(&[-1, 0, 0, 0, 3, 4]) } else { lab.chain(4) };
    let text: Vec<u32> = (0..rows).map(|_| lab.token(&[])).collect();
    let context = &text[..rows - tree.len()];
    let expected = lab.plain_tree(context, &tree)?;
    lab.fresh(context)?;
    let found = lab.verify(context.len(), &tree)?;
    let experiment = || {
        let start = context.len();
        format!("after {start} tokens, {}, up to the last of {rows} rows", describe(&[], &tree))
    };
    lab.compare(&expected, &found, experiment)?;
    let last = tree.len() - 1;
    let path = path_tokens(&tree, last);
    lab.commit(context.len(), &tree, last)?;
    let (committed, rest) = ([context, &path].concat(), &text[context.len() + path.len()..]);
    if !rest.is_empty() {
        let (found, _) = lab.prefill(committed.len(), rest)?;
        let expected = lab.plain(&[&committed[..], rest].concat())?;
        lab.compare(&[expected], &[found], || {
            format!("{}, the path committed, then a prefill of {rest:?}", experiment())
        })?;
    }
    Ok(Ok(()))
}
