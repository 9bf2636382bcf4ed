/// How a round drafts.
///
/// Nothing in this crate compares algorithms for equality to decide what a
/// round needs: it asks the methods below. An engine should do the same, so
/// that a new algorithm cannot silently run without the inputs it reads.
///
/// | algorithm | drafter | lists per depth | tree mask |
/// |---|---|---|---|
/// | `Autoregressive` | no | - | no |
/// | `Chain` | yes | best token only | no |
/// | `Tree` | yes | top-k | yes |
///
/// ```
/// use ddtree::Algorithm;
///
/// let algorithm: Algorithm = "tree".parse()?;
/// assert!(algorithm.needs_drafter() && algorithm.needs_tree_mask());
/// assert!(!Algorithm::Chain.needs_tree_mask());
/// # Ok::<(), ddtree::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
#[non_exhaustive]
pub enum Algorithm {
    /// One token per round, no draft.
    #[cfg_attr(feature = "serde", serde(alias = "ar"))]
    Autoregressive,
    /// The drafter's best token at every depth, verified as one path (DFlash).
    Chain,
    /// The most probable prefixes of the drafter's top-k lists, verified at
    /// once (DDTree).
    #[default]
    Tree,
}

impl Algorithm {
    /// All algorithms, from the simplest on.
    pub const ALL: &'static [Self] = &[Self::Autoregressive, Self::Chain, Self::Tree];

    /// Whether a round asks a drafter for a proposal. A drafter that reads
    /// features of the target then has to observe every committed token.
    pub fn needs_drafter(self) -> bool {
        !matches!(self, Self::Autoregressive)
    }

    /// Whether a round may hold two nodes of one depth, so that attention has
    /// to be restricted to ancestors.
    pub fn needs_tree_mask(self) -> bool {
        matches!(self, Self::Tree)
    }

    /// Short name: `ar`, `chain` or `tree`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Autoregressive => "ar",
            Self::Chain => "chain",
            Self::Tree => "tree",
        }
    }
}

impl std::fmt::Display for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Algorithm {
    type Err = crate::Error;

    /// Reads the [`name`](Algorithm::name) of an algorithm, or `autoregressive`.
    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let name = if name == "autoregressive" { "ar" } else { name };
        Self::ALL
            .iter()
            .copied()
            .find(|algorithm| algorithm.name() == name)
            .ok_or_else(|| crate::Error::setting("algorithm", name, "ar, chain or tree"))
    }
}
