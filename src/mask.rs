use crate::{DraftTree, Error, commit::reserve};

/// Which slots each slot of a tree attends to: its ancestors and itself.
///
/// A bit set per slot, `words_per_row` words of 64 bits each. Bit `j % 64` of
/// word `j / 64` of row `i` says whether slot `i` sees slot `j`. Rows follow
/// one another without gaps. The committed prefix is not part of it: every slot
/// sees all of that.
///
/// ```
/// use ddtree::{AncestorMask, DraftTree};
///
/// let tree = DraftTree::from_parents(&[7, 4, 9, 5], &[-1, 0, 0, 1])?;
/// let mut mask = AncestorMask::new();
/// mask.build(&tree);
/// assert_eq!(mask.rows(), [0b0001, 0b0011, 0b0101, 0b1011]);
/// assert!(mask.is_visible(3, 1) && !mask.is_visible(3, 2));
/// # Ok::<(), ddtree::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AncestorMask {
    rows: Vec<u64>,
    slots: usize,
}

impl AncestorMask {
    /// A mask of no slots.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes room for trees of `slots` slots, so that building their masks
    /// allocates nothing; no room if memory does not hold them.
    pub fn reserve(&mut self, slots: usize) {
        reserve(&mut self.rows, slots.saturating_mul(slots.div_ceil(64)));
    }

    /// Replaces the mask by that of `tree`.
    ///
    /// # Complexity
    ///
    /// O(n²/64) for n slots: each row is its parent's row and one more bit.
    pub fn build(&mut self, tree: &DraftTree) {
        self.fill(tree, tree.len());
    }

    /// Replaces the mask by that of `tree`, padded to `width` slots for kernels
    /// of a fixed shape. A padding slot sees the root and itself, as if it were a
    /// child of the root, so that no row is ever fully masked; no slot of the
    /// tree sees a padding slot.
    ///
    /// # Errors
    ///
    /// If `width` is less than the number of slots, or memory does not hold the
    /// mask. The mask is unchanged then.
    ///
    /// ```
    /// use ddtree::{AncestorMask, DraftTree};
    ///
    /// let tree = DraftTree::from_parents(&[7, 4], &[-1, 0])?;
    /// let mut mask = AncestorMask::new();
    /// mask.build_padded(&tree, 4)?;
    /// assert_eq!(mask.rows(), [0b0001, 0b0011, 0b0101, 0b1001]);
    /// # Ok::<(), ddtree::Error>(())
    /// ```
    pub fn build_padded(&mut self, tree: &DraftTree, width: usize) -> Result<(), Error> {
        if width < tree.len() {
            let accepted = format_args!("at least the {} slots of the tree", tree.len());
            return Err(Error::setting("width", width, accepted));
        }
        self.check_memory("width", width)?;
        self.fill(tree, width);
        Ok(())
    }

    /// Makes room for the rows of `slots` slots.
    fn check_memory(&mut self, field: &'static str, slots: usize) -> Result<(), Error> {
        let words = slots.checked_mul(slots.div_ceil(64));
        let more = words.map(|words| words.saturating_sub(self.rows.len()));
        if more.is_some_and(|more| self.rows.try_reserve(more).is_ok()) {
            return Ok(());
        }
        Err(Error::setting(field, slots, "as many slots as memory holds the mask of"))
    }

    /// Replaces the mask by that of `slots` slots of which each sees itself and all
    /// before it: a chain, or a prefill, where one kernel call has one form of mask
    /// for all sequences of a batch, trees among them.
    ///
    /// # Errors
    ///
    /// If memory does not hold the mask. It is unchanged then.
    ///
    /// # Complexity
    ///
    /// O(n²/64) for n slots.
    ///
    /// ```
    /// use ddtree::AncestorMask;
    ///
    /// let mut mask = AncestorMask::new();
    /// mask.build_causal(3)?;
    /// assert_eq!(mask.rows(), [0b001, 0b011, 0b111]);
    /// # Ok::<(), ddtree::Error>(())
    /// ```
    pub fn build_causal(&mut self, slots: usize) -> Result<(), Error> {
        self.check_memory("slots", slots)?;
        self.slots = slots;
        let words = self.words_per_row();
        self.rows.clear();
        self.rows.resize(slots * words, 0);
        for (slot, row) in self.rows.chunks_exact_mut(words.max(1)).enumerate() {
            row[..slot / 64].fill(u64::MAX);
            row[slot / 64] = u64::MAX >> (63 - slot % 64);
        }
        Ok(())
    }

    fn fill(&mut self, tree: &DraftTree, width: usize) {
        self.slots = width;
        let words = self.words_per_row();
        self.rows.clear();
        self.rows.resize(width * words, 0);
        for slot in 0..width {
            // Padding slots hang below the root.
            let parent = tree.parents().get(slot).copied().unwrap_or(0);
            let (earlier, row) = self.rows.split_at_mut(slot * words);
            if let Ok(parent) = usize::try_from(parent) {
                row[..words].copy_from_slice(&earlier[parent * words..][..words]);
            }
            row[slot / 64] |= 1 << (slot % 64);
        }
    }

    /// Number of slots, padding included: the number of rows.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Words in a row: the number of slots over 64, rounded up.
    pub fn words_per_row(&self) -> usize {
        self.slots.div_ceil(64)
    }

    /// All rows, in slot order.
    pub fn rows(&self) -> &[u64] {
        &self.rows
    }

    /// The row of one slot; empty for a slot outside the tree.
    #[inline]
    pub fn row(&self, slot: usize) -> &[u64] {
        if slot >= self.slots {
            return &[];
        }
        let words = self.words_per_row();
        &self.rows[slot * words..][..words]
    }

    /// Whether slot `query` sees slot `key`; false outside the tree.
    #[inline]
    pub fn is_visible(&self, query: usize, key: usize) -> bool {
        self.row(query).get(key / 64).is_some_and(|word| word >> (key % 64) & 1 == 1)
    }

    /// Bytes held, used or not.
    pub fn memory_usage(&self) -> usize {
        self.rows.capacity() * 8
    }
}
