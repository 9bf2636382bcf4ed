/// A child that could become the next node, or [`NOTHING`](Candidate::NOTHING).
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    // An integer of the same order as the score.
    key: u64,
    pub(super) place: Place,
}

impl Candidate {
    /// Comes after all others.
    pub(super) const NOTHING: Self = Self::filler(0);

    /// `score` is above -inf.
    #[inline]
    pub(super) fn new(score: f64, place: Place) -> Self {
        // Negative numbers have their bits inverted, the others the sign alone. There are no NaN,
        // and no -0 since sums begin with 0.
        let bits = score.to_bits();
        Self { key: bits ^ ((bits as i64 >> 63) as u64 | 1 << 63), place }
    }

    #[inline]
    pub(super) fn score(&self) -> f64 {
        f64::from_bits(self.key ^ ((!self.key as i64 >> 63) as u64 | 1 << 63))
    }

    #[inline]
    pub(super) fn is_nothing(&self) -> bool {
        self.key == Self::NOTHING.key
    }

    /// Whether the score is at least that of `other`.
    #[inline]
    pub(super) fn is_at_least(&self, other: &Self) -> bool {
        self.key >= other.key
    }

    const fn filler(key: u64) -> Self {
        Self { key, place: Place { parent: 0, rank: 0, token: 0, elder: -1 } }
    }
}

/// Where a candidate hangs and what it carries.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) parent: u32,
    pub(super) rank: u32,
    pub(super) token: u32,
    /// The sibling of the rank before, a slot; -1 for rank 0.
    pub(super) elder: i32,
}

/// The candidates of a growing tree: a heap, the greatest score first.
///
/// Which of two comes first in a heap is as good as random, so a branch on it is
/// mispredicted half of the time, and that is what heaps of this size spend their
/// time on. Here each level costs one such branch, whether to go on: four ways
/// halve the levels, and which of the four is greatest is found without branches.
///
/// Methods that move candidates take `before`, which orders places of equal
/// scores. It is asked about equal scores only.
#[derive(Clone, Debug, Default)]
pub(super) struct Frontier {
    // The greatest is entry TOP; below entry `i` are four from `below(i)` on. What
    // has no candidate up to a multiple of four is filled up.
    entries: Vec<Candidate>,
    end: usize,
}

const WAYS: usize = 4;
const TOP: usize = WAYS - 1;

fn below(entry: usize) -> usize {
    WAYS * (entry - 2)
}

fn above(entry: usize) -> usize {
    entry / WAYS + 2
}

/// Four entries without candidates. No score has keys as low as these. They differ
/// so that equal keys are those of candidates.
const EMPTY: [Candidate; WAYS] =
    [Candidate::filler(0), Candidate::filler(1), Candidate::filler(2), Candidate::filler(3)];

impl Frontier {
    /// Makes room for as many candidates.
    pub(super) fn reserve(&mut self, candidates: usize) {
        let entries = (TOP + candidates).next_multiple_of(WAYS);
        self.entries.reserve(entries.saturating_sub(self.entries.len()));
    }

    pub(super) fn memory_usage(&self) -> usize {
        self.entries.capacity() * size_of::<Candidate>()
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.entries.extend(EMPTY);
        self.end = TOP;
    }

    /// The greatest.
    #[inline]
    pub(super) fn first(&self) -> Option<Candidate> {
        (self.end > TOP).then(|| self.entries[TOP])
    }

    #[inline]
    pub(super) fn push(&mut self, new: Candidate, before: impl Fn(Place, Place) -> bool) {
        let mut hole = self.end;
        if hole == self.entries.len() {
            self.entries.extend(EMPTY);
        }
        self.end += 1;
        while hole > TOP {
            let entry = self.entries[above(hole)];
            if entry.key > new.key || (entry.key == new.key && before(entry.place, new.place)) {
                break;
            }
            self.entries[hole] = entry;
            hole = above(hole);
        }
        self.entries[hole] = new;
    }

    /// Takes the greatest out.
    pub(super) fn pop(&mut self, before: impl Fn(Place, Place) -> bool) {
        if self.end <= TOP {
            return;
        }
        self.end -= 1;
        let last = self.entries[self.end];
        self.entries[self.end] = EMPTY[self.end % WAYS];
        if self.end > TOP {
            self.replace(last, before);
        }
    }

    /// Puts a candidate in the place of the greatest; there has to be one.
    #[inline(always)]
    pub(super) fn replace(&mut self, new: Candidate, before: impl Fn(Place, Place) -> bool) {
        let mut hole = TOP;
        while let Some(four) = self.entries.get(below(hole)..).and_then(|e| e.first_chunk()) {
            let (a, b, c, d) = (four[0].key, four[1].key, four[2].key, four[3].key);
            let (ab, i) = if b > a { (b, 1) } else { (a, 0) };
            let (cd, j) = if d > c { (d, 3) } else { (c, 2) };
            let (best, mut at) = if cd > ab { (cd, j) } else { (ab, i) };
            if best < new.key {
                break;
            }
            if a == b || c == d || ab == cd || best == new.key {
                at = first_of_equals(four, best, &before);
                if best == new.key && before(new.place, four[at].place) {
                    break;
                }
            }
            self.entries[hole] = four[at];
            hole = below(hole) + at;
        }
        self.entries[hole] = new;
    }
}

/// Which of those that have the key `best` is the first.
#[cold]
#[inline(never)]
fn first_of_equals(
    four: &[Candidate; WAYS],
    best: u64,
    before: &impl Fn(Place, Place) -> bool,
) -> usize {
    let equals = (0..WAYS).filter(|&at| four[at].key == best);
    equals.reduce(|a, b| if before(four[b].place, four[a].place) { b } else { a }).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pushes, replacements and removals against a list that is searched; many scores are equal, and places of equal
    /// scores go by their rank.
    #[test]
    fn greatest_first_as_in_a_sorted_list() {
        let before = |a: Place, b: Place| a.rank < b.rank;
        let (mut frontier, mut list) = (Frontier::default(), Vec::new());
        let mut state = 0x2545_f491u32;
        // miri takes seconds for each.
        let rounds = if cfg!(miri) { 3 } else { 40 };
        for round in 0..rounds {
            frontier.clear();
            list.clear();
            for step in 0..200 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let score = f64::from(state >> 24 & 0x1f) - f64::from(16 + round % 3 * 8);
                let rank = state.rotate_left(16);
                let place = Place { parent: 0, rank, token: step, elder: -1 };
                let new = Candidate::new(score, place);
                list.sort_by(|a: &Candidate, b: &Candidate| {
                    b.score().total_cmp(&a.score()).then(a.place.rank.cmp(&b.place.rank))
                });
                let same = |a: Candidate, b: &Candidate| {
                    assert_eq!((a.score(), a.place.token), (b.score(), b.place.token));
                };
                match (frontier.first(), list.first()) {
                    (Some(found), Some(expected)) => same(found, expected),
                    (found, expected) => assert_eq!(found.is_none(), expected.is_none()),
                }
                match state >> 29 {
                    0 | 1 if !list.is_empty() => {
                        frontier.pop(before);
                        list.remove(0);
                    }
                    2 | 3 if !list.is_empty() => {
                        frontier.replace(new, before);
                        list[0] = new;
                    }
                    _ => {
                        frontier.push(new, before);
                        list.push(new);
                    }
                }
            }
            assert!(list.len() > 10);
        }
    }
}
