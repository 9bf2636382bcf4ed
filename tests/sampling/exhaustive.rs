//! Every tree and every outcome over three tokens.

use ddtree::{Acceptance, DraftTree, walk};

const V: usize = 3;

/// Every tree of at most two levels below the root: 729.
fn trees() -> Vec<DraftTree> {
    let mut trees = Vec::new();
    for below in (0..9usize.pow(3)).map(|code| [code % 9, code / 9 % 9, code / 81]) {
        // For each token: 0 if the root has no such child, else 1 and a set of that child's
        // children.
        let mut tree = DraftTree::new(0);
        for (token, &code) in below.iter().enumerate() {
            if code > 0 {
                let child = tree.push(0, token as u32, 0.0).unwrap();
                for grandchild in (0..V).filter(|bit| (code - 1) >> bit & 1 == 1) {
                    tree.push(child, grandchild as u32, 0.0).unwrap();
                }
            }
        }
        trees.push(tree);
    }
    trees
}

fn path(tree: &DraftTree, slot: usize) -> Vec<u32> {
    let mut path: Vec<u32> =
        tree.ancestors(slot).filter(|&s| s > 0).map(|s| tree.tokens()[s]).collect();
    path.reverse();
    path
}

/// Probabilities after a path; any will do.
fn law(path: &[u32]) -> [f64; V] {
    let x = path.iter().fold(1u32, |x, token| x * 5 + token + 1);
    let weights = [1 + x % 7, 1 + x % 5, 1 + x % 11].map(f64::from);
    weights.map(|w| w / weights.iter().sum::<f64>())
}

/// If the pick after a path is a function of the path, as it is for a given seed, then any tree,
/// also one made with knowledge of all picks, gives the text of decoding without a draft.
#[test]
fn no_tree_changes_what_given_picks_say() {
    let trees = trees();
    assert_eq!(trees.len(), 729);
    let mut outcome = Acceptance::new();
    for code in 0..81u32 {
        let pick = |path: &[u32]| match *path {
            [] => code % 3,
            [a] => code / 3u32.pow(a + 1) % 3,
            _ => (path.iter().sum::<u32>() + code) % 3,
        };
        let mut text = Vec::new();
        while text.len() < 3 {
            text.push(pick(&text));
        }
        for tree in &trees {
            let picks: Vec<u32> = (0..tree.len()).map(|slot| pick(&path(tree, slot))).collect();
            walk(tree, &picks, &mut outcome).unwrap();
            assert_eq!(outcome.tokens(), &text[..outcome.tokens().len()]);
        }
    }
}

/// The probability of every text of three tokens, from the outcomes of one round and their
/// probabilities.
fn texts(outcomes: impl Iterator<Item = (Vec<u32>, f64)>) -> Vec<f64> {
    let mut texts = vec![0.0; V.pow(3)];
    for (tokens, probability) in outcomes {
        for (text, total) in texts.iter_mut().enumerate() {
            let text = [text / 9, text / 3 % 3, text % 3].map(|token| token as u32);
            if text.starts_with(&tokens) {
                let rest = (tokens.len()..3).map(|i| law(&text[..i])[text[i] as usize]);
                *total += probability * rest.product::<f64>();
            }
        }
    }
    texts
}

/// Independent draws at every slot, all of them enumerated.
#[test]
fn a_round_has_the_targets_law() {
    let expected = texts(std::iter::once((Vec::new(), 1.0)));
    let mut outcome = Acceptance::new();
    for tree in trees().iter().filter(|tree| tree.len() <= 8) {
        let laws: Vec<[f64; V]> = (0..tree.len()).map(|slot| law(&path(tree, slot))).collect();
        let outcomes = (0..V.pow(tree.len() as u32)).map(|code| {
            let digits = (0..tree.len() as u32).map(|slot| code / V.pow(slot) % V);
            let picks: Vec<u32> = digits.map(|digit| digit as u32).collect();
            let probability =
                picks.iter().zip(&laws).map(|(&pick, law)| law[pick as usize]).product();
            walk(tree, &picks, &mut outcome).unwrap();
            (outcome.tokens().to_vec(), probability)
        });
        let found = texts(outcomes);
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-12);
        }
    }
}

/// The same enumeration for children accepted with probability min(1, p / q) in the drafter's
/// order, with the residual max(0, p - q) for the bonus: it is the law that differs.
#[test]
fn the_ratio_test_has_another_law() {
    let q = [0.5, 0.3, 0.2];
    let expected = texts(std::iter::once((Vec::new(), 1.0)));
    for children in [1, 2] {
        let p = law(&[]);
        let mut outcomes = Vec::new();
        let mut left = 1.0;
        for token in 0..children {
            let accept = f64::min(1.0, p[token] / q[token]);
            outcomes.push((vec![token as u32], left * accept));
            left *= 1.0 - accept;
        }
        let residual: Vec<f64> = (0..V).map(|t| (p[t] - q[t]).max(0.0)).collect();
        let sum: f64 = residual.iter().sum();
        outcomes.extend((0..V).map(|t| (vec![t as u32], left * residual[t] / sum)));
        let found = texts(outcomes.into_iter());
        assert!((found.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        let distance: f64 = found.iter().zip(&expected).map(|(f, e)| (f - e).abs()).sum();
        assert!(distance / 2.0 > 0.05, "total variation {}", distance / 2.0);
    }
}
