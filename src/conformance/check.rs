/// What is checked. The order of [`ALL`](Self::ALL) is that of a report: if all
/// checks before one pass, the one that fails names the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Check {
    /// A prefill gives one pick, and the same one every time.
    PrefillRepeats,
    /// A reset leaves nothing of what came before.
    Reset,
    /// A prompt in two parts is the prompt in one.
    PrefillSplit,
    /// Picks are those of the verification they come with.
    FreshPicks,
    /// A tree that is only a root is one step of plain decoding.
    LoneRoot,
    /// The picks of a chain are those of plain decoding.
    ChainEqualsPlain,
    /// A pick does not depend on tokens that are no ancestors.
    SiblingsDoNotSeeEachOther,
    /// A pick does not depend on how many slots come before it.
    PositionsFollowDepth,
    /// Token 0 is a token like any other.
    TokenZero,
    /// Equal tokens below different parents are different nodes.
    EqualTokens,
    /// The picks of a tree are those of its paths, one by one.
    TreeEqualsPaths,
    /// Picks at slots that are wanted do not depend on skipping the others.
    UnwantedSlots,
    /// After a commit, neither the bonus nor a rejected node has a row.
    BonusNotKept,
    /// A commit of leading slots leaves what plain decoding would have.
    CommitPrefix,
    /// So does a commit of the root alone, after a tree.
    ZeroAcceptance,
    /// So does a commit of slots that are not the leading ones.
    CommitScatteredPath,
    /// Features handed over are those of the accepted path.
    FeaturesByPath,
    /// A verification can be repeated, also with another tree.
    RepeatedVerify,
    /// A prefill after rounds is one after plain decoding.
    PrefillAfterRounds,
    /// A reset to some rows keeps those and no others.
    ResetToPrefix,
    /// After an error, the same call can come again.
    ErrorRecovery,
    /// A long text by trees is that of plain decoding.
    LongRun,
    /// The cache holds as many rows as the verifier says.
    FullCache,
    /// Arrays: padding hides itself, and leaves no row without a key.
    Padding,
    /// Arrays: siblings carry distinct tokens.
    DistinctSiblings,
    /// Arrays: taps read the layers that they name.
    Taps,
}

impl Check {
    /// All checks, in order; those of arrays last.
    pub const ALL: &'static [Self] = &[
        Self::PrefillRepeats,
        Self::Reset,
        Self::PrefillSplit,
        Self::FreshPicks,
        Self::LoneRoot,
        Self::ChainEqualsPlain,
        Self::SiblingsDoNotSeeEachOther,
        Self::PositionsFollowDepth,
        Self::TokenZero,
        Self::EqualTokens,
        Self::TreeEqualsPaths,
        Self::UnwantedSlots,
        Self::BonusNotKept,
        Self::CommitPrefix,
        Self::ZeroAcceptance,
        Self::CommitScatteredPath,
        Self::FeaturesByPath,
        Self::RepeatedVerify,
        Self::PrefillAfterRounds,
        Self::ResetToPrefix,
        Self::ErrorRecovery,
        Self::LongRun,
        Self::FullCache,
        Self::Padding,
        Self::DistinctSiblings,
        Self::Taps,
    ];

    /// Name in snake case.
    pub fn name(self) -> &'static str {
        match self {
            Self::PrefillRepeats => "prefill_repeats",
            Self::Reset => "reset",
            Self::PrefillSplit => "prefill_split",
            Self::FreshPicks => "fresh_picks",
            Self::LoneRoot => "lone_root",
            Self::ChainEqualsPlain => "chain_equals_plain",
            Self::SiblingsDoNotSeeEachOther => "siblings_do_not_see_each_other",
            Self::PositionsFollowDepth => "positions_follow_depth",
            Self::TokenZero => "token_zero",
            Self::EqualTokens => "equal_tokens",
            Self::TreeEqualsPaths => "tree_equals_paths",
            Self::UnwantedSlots => "unwanted_slots",
            Self::BonusNotKept => "bonus_not_kept",
            Self::CommitPrefix => "commit_prefix",
            Self::ZeroAcceptance => "zero_acceptance",
            Self::CommitScatteredPath => "commit_scattered_path",
            Self::FeaturesByPath => "features_by_path",
            Self::RepeatedVerify => "repeated_verify",
            Self::PrefillAfterRounds => "prefill_after_rounds",
            Self::ResetToPrefix => "reset_to_prefix",
            Self::ErrorRecovery => "error_recovery",
            Self::LongRun => "long_run",
            Self::FullCache => "full_cache",
            Self::Padding => "padding",
            Self::DistinctSiblings => "distinct_siblings",
            Self::Taps => "taps",
        }
    }

    /// What is usually wrong if this check is the first to fail.
    pub fn cause(self) -> &'static str {
        match self {
            Self::PrefillRepeats => {
                "the engine is not deterministic, a reset has no effect, or a prefill does not pick once"
            }
            Self::Reset => "rows or recurrent state survive a reset",
            Self::PrefillSplit => {
                "positions or rows of a prefill do not start where it says, or kernels depend on \
                 the number of rows"
            }
            Self::FreshPicks => {
                "picks are read before the pass has written them, or from an older buffer"
            }
            Self::LoneRoot => "the root's token, position or row is another one than the round's",
            Self::ChainEqualsPlain => {
                "a round without a mask is not causal, or its positions do not ascend"
            }
            Self::SiblingsDoNotSeeEachOther => {
                "the mask goes by slot order, or recurrent state passes from sibling to sibling"
            }
            Self::PositionsFollowDepth => {
                "positions are made from slot indices instead of depths, or a captured graph still \
                 reads old ones"
            }
            Self::TokenZero => "token 0 is taken for padding",
            Self::EqualTokens => "nodes are looked up by depth and token instead of by slot",
            Self::TreeEqualsPaths => {
                "a mask, position or parent is wrong for some shape of tree, or from some slot on"
            }
            Self::UnwantedSlots => {
                "rows of logits are counted by picks made, so that a skipped slot shifts those \
                 after it, or slots are skipped that the picks lead to"
            }
            Self::BonusNotKept => {
                "one row too many is committed: the bonus has been chosen but not forwarded"
            }
            Self::CommitPrefix => {
                "the number of rows after a commit, or recurrent state, is not that of the path"
            }
            Self::ZeroAcceptance => {
                "recurrent state is not restored where nothing was accepted, or such a commit is \
                 skipped"
            }
            Self::CommitScatteredPath => {
                "the leading rows are kept instead of those of the path, or moved in another order"
            }
            Self::FeaturesByPath => "features are taken in slot order instead of along the path",
            Self::RepeatedVerify => {
                "a verification changes committed rows or state, or a commit refers to an older one"
            }
            Self::PrefillAfterRounds => "rows that were rejected are still visible to a prefill",
            Self::ResetToPrefix => "rows beyond those kept stay visible, or too few are kept",
            Self::ErrorRecovery => "a call that failed has changed committed rows or state",
            Self::LongRun => "something drifts or wraps that short rounds do not reach",
            Self::FullCache => {
                "the cache has fewer rows than `max_len` says, or its last ones wrap or are clamped"
            }
            Self::Padding => "padding is visible to the tree, or a padding row sees nothing",
            Self::DistinctSiblings => "a tree was padded with, or built from, a token twice",
            Self::Taps => {
                "layers are counted from another end of the list: `hidden_states[0]` of \
                 transformers is the embedding, and the output of layer i is entry i + 1"
            }
        }
    }
}

impl std::fmt::Display for Check {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}
