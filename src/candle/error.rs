use std::path::{Path, PathBuf};

use candle_core::DType;

/// What a candle backend operation can fail with.
///
/// Everything about a checkpoint fails closed: a field, tensor or file that is not understood is an
/// error that names it, what was found, and what would have been accepted.
///
/// What another library said is the [`source`](std::error::Error::source) and not repeated in the
/// message: print the whole chain.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// candle itself failed (a kernel, an allocation, a damaged file).
    #[error(transparent)]
    Candle(#[from] candle_core::Error),

    /// The core refused what the backend handed to it.
    #[error(transparent)]
    Core(#[from] crate::Error),

    /// The CUDA driver failed.
    #[cfg(feature = "cuda")]
    #[error("CUDA failed")]
    Cuda(#[from] cudarc::driver::DriverError),

    /// cuBLAS failed.
    #[cfg(feature = "cuda")]
    #[error("cuBLAS failed")]
    Cublas(#[from] cudarc::cublaslt::result::CublasError),

    /// A library that GPUs need is not installed.
    #[cfg(feature = "cuda")]
    #[error("{library} was not found on this machine")]
    NoCuda {
        /// Which one.
        library: &'static str,
    },

    /// A file could not be read.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },

    /// A JSON file did not parse.
    #[error("cannot parse {}", path.display())]
    Json {
        /// The file, or the name given to an in-memory document.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },

    /// A checkpoint file has a value that is not supported or contradicts another.
    #[error("config field `{field}`: found {found}, accepted: {accepted}")]
    Config {
        /// The field, dotted where nested.
        field: String,
        /// Its value as found.
        found: String,
        /// What would have been accepted.
        accepted: String,
    },

    /// The model needs a tensor that the checkpoint does not have.
    #[error("tensor `{name}` is missing (expected shape {expected:?})")]
    MissingTensor {
        /// Its name.
        name: String,
        /// The shape it should have.
        expected: Vec<usize>,
    },

    /// A tensor's shape differs from what the configuration implies.
    #[error("tensor `{name}` has shape {found:?}, expected {expected:?}")]
    TensorShape {
        /// Its name.
        name: String,
        /// The shape in the checkpoint.
        found: Vec<usize>,
        /// The shape that the configuration implies.
        expected: Vec<usize>,
    },

    /// A tensor is stored in a type that is no floating-point weight.
    #[error("tensor `{name}` is stored as {found}, accepted: {accepted}")]
    TensorType {
        /// Its name.
        name: String,
        /// The stored type.
        found: String,
        /// The accepted types.
        accepted: &'static str,
    },

    /// The checkpoint has tensors that the model does not know; loading them "mostly" would run a
    /// different model.
    #[error("{} unknown tensor(s), first: {}", names.len(), names.iter().take(4).map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", "))]
    UnknownTensors {
        /// All of them, sorted.
        names: Vec<String>,
    },

    /// The same tensor is in more than one file of the checkpoint.
    #[error("tensor `{name}` is in both {} and {}", first.display(), second.display())]
    DuplicateTensor {
        /// Its name.
        name: String,
        /// A file that has it.
        first: PathBuf,
        /// Another file that has it.
        second: PathBuf,
    },

    /// The backend does not compute in this type.
    #[error("dtype {found:?} is not supported, accepted: F32, BF16, F16")]
    UnsupportedDtype {
        /// The type asked for.
        found: DType,
    },

    /// An argument of a call is out of range or does not fit the others.
    #[error("`{name}`: got {found}, accepted: {accepted}")]
    Argument {
        /// The argument.
        name: &'static str,
        /// What it was.
        found: String,
        /// What would have been accepted.
        accepted: String,
    },

    /// A row of logits that the text reaches holds NaN or +inf, or nothing but -inf: the arithmetic
    /// overflowed (usually `f16` activations), and any token picked from it would be arbitrary.
    ///
    /// It is this error wherever the row is picked from. A good row of which bias and constraint leave
    /// no token is [`NoToken`](crate::Error::NoToken), in [`Core`](Error::Core).
    #[error("logits of row {row} are not finite; run this model in bf16 or f32")]
    NonFiniteLogits {
        /// The row among those asked for.
        row: usize,
    },
}

impl Error {
    pub(crate) fn config(
        field: impl Into<String>,
        found: impl ToString,
        accepted: impl Into<String>,
    ) -> Self {
        Error::Config { field: field.into(), found: found.to_string(), accepted: accepted.into() }
    }

    pub(crate) fn argument(
        name: &'static str,
        found: impl ToString,
        accepted: impl Into<String>,
    ) -> Self {
        Error::Argument { name, found: found.to_string(), accepted: accepted.into() }
    }

    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Error::Io { path, source }
    }
}

/// A result with the candle backend's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
