use crate::{DraftTree, Error, commit::reserve};

/// How the recurrent layers of a target run over a tree and what they keep of
/// it: the companion of [`CommitPlan`](crate::CommitPlan), which does the same
/// for KV rows.
///
/// Attention verifies a tree with a mask. A recurrent layer cannot: slot `i`
/// has to start from the state after its *parent*, and a causal convolution
/// over it has to read its *ancestors*, whatever slots lie between. After the
/// walk, the committed state is the one after the deepest accepted slot.
///
/// An engine [sets](Self::set) the plan for a tree and then runs either way:
///
/// * **states**: for every group of [`groups`](Self::groups), which can run as
///   one batch, read the states of the [`parents`](Self::parents) and store one
///   state per slot; commit the state of [`source`](Self::source).
/// * **replay**: keep the state from before the round, verify in any way that
///   is exact, and run the tokens of [`replay`](Self::replay) from that state.
///
/// Slots are numbered as in the tree. Negative numbers name what was there
/// before the round: parent -1 is the committed state, and ancestor -1 is the
/// last input of the convolution before the root, -2 the one before that. On a
/// chain ancestor `t` (from 1) of slot `i` is therefore `i - t`.
///
/// After warm-up, or after [`reserve`](Self::reserve), nothing is allocated.
///
/// ```
/// use ddtree::{DraftTree, StatePlan};
///
/// //        0
/// //      /   \
/// //     1     2
/// //     |     |
/// //     4     3
/// let tree = DraftTree::from_parents(&[7, 4, 9, 5, 5], &[-1, 0, 0, 2, 1])?;
/// let mut plan = StatePlan::new(3);
/// plan.set(&tree);
/// assert_eq!(plan.parents(), [-1, 0, 0, 2, 1]);
/// assert_eq!(plan.groups().collect::<Vec<_>>(), [&[0][..], &[1, 2], &[3, 4]]);
/// // The parent, its parent, and the last input before the round.
/// assert_eq!(plan.ancestors(3), [2, 0, -1]);
///
/// plan.accept(&[0, 2, 3])?;
/// assert_eq!(plan.source(), Some(3));
/// assert_eq!(plan.replay(), [7, 9, 5]);
/// assert_eq!(plan.window(), [0, 2, 3]);
/// assert!(!plan.is_prefix());
/// # Ok::<(), ddtree::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StatePlan {
    window_len: usize,
    tokens: Vec<u32>,
    parents: Vec<i32>,
    by_depth: Vec<u32>,
    // Where the group of each depth ends in `by_depth`.
    group_ends: Vec<u32>,
    // `window_len` per slot.
    ancestors: Vec<i32>,
    path: Vec<u32>,
    replay: Vec<u32>,
    window: Vec<i32>,
}

impl StatePlan {
    /// A plan for layers whose convolution reads `window_len` inputs before the
    /// current one: its kernel width minus 1, or 0 if there is none.
    pub fn new(window_len: usize) -> Self {
        Self { window_len, ..Self::default() }
    }

    /// Makes room for trees of `slots` slots; none if memory does not hold them.
    pub fn reserve(&mut self, slots: usize) {
        reserve(&mut self.tokens, slots);
        reserve(&mut self.parents, slots);
        reserve(&mut self.by_depth, slots);
        reserve(&mut self.group_ends, slots);
        reserve(&mut self.ancestors, slots.saturating_mul(self.window_len));
        reserve(&mut self.path, slots);
        reserve(&mut self.replay, slots);
        reserve(&mut self.window, self.window_len);
    }

    /// Replaces the plan by the one for `tree`, with nothing accepted yet.
    ///
    /// # Complexity
    ///
    /// O(slots × window).
    pub fn set(&mut self, tree: &DraftTree) {
        self.forget_outcome();
        self.tokens.clear();
        self.tokens.extend_from_slice(tree.tokens());
        self.parents.clear();
        self.parents.extend_from_slice(tree.parents());

        // A counting sort by depth that keeps slots ascending within a group.
        self.group_ends.clear();
        for &depth in tree.depths() {
            // A slot's depth exceeds all before it by at most one.
            if depth as usize == self.group_ends.len() {
                self.group_ends.push(0);
            }
            self.group_ends[depth as usize] += 1;
        }
        let mut start = 0;
        for end in &mut self.group_ends {
            (*end, start) = (start, start + *end);
        }
        self.by_depth.clear();
        self.by_depth.resize(tree.len(), 0);
        for (slot, &depth) in tree.depths().iter().enumerate() {
            let end = &mut self.group_ends[depth as usize];
            self.by_depth[*end as usize] = slot as u32;
            *end += 1;
        }

        let len = self.window_len;
        self.ancestors.clear();
        for &parent in tree.parents() {
            if len == 0 {
                break;
            }
            match usize::try_from(parent) {
                Ok(above) => {
                    self.ancestors.push(parent);
                    self.ancestors.extend_from_within(above * len..above * len + len - 1);
                }
                Err(_) => self.ancestors.extend((1..=len as i32).map(|t| -t)),
            }
        }
    }

    /// Takes note of the accepted slots, root first, as in
    /// [`CommitPlan::path`](crate::CommitPlan::path).
    ///
    /// # Errors
    ///
    /// If `path` does not start at the root of the tree or a slot is not the
    /// parent of the next. The plan then has no outcome.
    pub fn accept(&mut self, path: &[u32]) -> Result<(), Error> {
        self.forget_outcome();
        let mut last = -1;
        for &slot in path {
            if self.parents.get(slot as usize) != Some(&last) {
                let (slot, found) = (slot as usize, format!("accepted after slot {last}"));
                let accepted = "a path that starts at the root and follows the tree";
                return Err(Error::Tree { slot, found, accepted });
            }
            last = slot as i32;
        }
        let Ok(source) = usize::try_from(last) else {
            let accepted = "a path of at least the root";
            return Err(Error::Tree { slot: 0, found: "nothing accepted".into(), accepted });
        };
        self.path.extend_from_slice(path);
        self.replay.extend(path.iter().map(|&slot| self.tokens[slot as usize]));
        if self.window_len > 0 {
            let above = &self.ancestors[source * self.window_len..][..self.window_len - 1];
            self.window.extend(above.iter().rev());
            self.window.push(last);
        }
        Ok(())
    }

    fn forget_outcome(&mut self) {
        self.path.clear();
        self.replay.clear();
        self.window.clear();
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.parents.len()
    }

    /// Inputs that the convolution reads before the current one.
    pub fn window_len(&self) -> usize {
        self.window_len
    }

    /// The slot whose state each slot starts from, -1 for the committed state.
    pub fn parents(&self) -> &[i32] {
        &self.parents
    }

    /// The slots of each depth, ascending, from depth 0 on. No slot of a group
    /// depends on another of its group, and all parents are in the group
    /// before.
    pub fn groups(&self) -> impl ExactSizeIterator<Item = &[u32]> + '_ {
        (0..self.group_ends.len()).map(|depth| {
            let start = if depth == 0 { 0 } else { self.group_ends[depth - 1] };
            &self.by_depth[start as usize..self.group_ends[depth] as usize]
        })
    }

    /// What the convolution reads before the input of `slot`, nearest first,
    /// [`window_len`](Self::window_len) entries; empty for a slot outside the
    /// tree. Entry -1 is the last input before the round, -2 the one before.
    pub fn ancestors(&self, slot: usize) -> &[i32] {
        if slot >= self.slots() {
            return &[];
        }
        &self.ancestors[slot * self.window_len..][..self.window_len]
    }

    /// The slot whose state is to be committed: the deepest one accepted.
    /// `None` before an outcome.
    pub fn source(&self) -> Option<usize> {
        self.path.last().map(|&slot| slot as usize)
    }

    /// The accepted slots, root first; empty before an outcome.
    pub fn path(&self) -> &[u32] {
        &self.path
    }

    /// The tokens of the accepted slots, root first: run from the state before
    /// the round, they lead to the committed state. Empty before an outcome.
    pub fn replay(&self) -> &[u32] {
        &self.replay
    }

    /// The inputs that the convolution's window holds after the commit, oldest
    /// first; numbered as in [`ancestors`](Self::ancestors). Empty before an
    /// outcome.
    pub fn window(&self) -> &[i32] {
        &self.window
    }

    /// Whether the accepted slots are the first ones, so that buffers in slot
    /// order are in path order too and nothing has to be gathered. False before
    /// an outcome.
    pub fn is_prefix(&self) -> bool {
        self.source().is_some_and(|source| source + 1 == self.path.len())
    }

    /// Bytes held, used or not.
    pub fn memory_usage(&self) -> usize {
        4 * (self.tokens.capacity()
            + self.parents.capacity()
            + self.by_depth.capacity()
            + self.group_ends.capacity()
            + self.ancestors.capacity()
            + self.path.capacity()
            + self.replay.capacity()
            + self.window.capacity())
    }
}
