//! Checkpoint tensors by name, taken one by one, with nothing left over.

use std::collections::{BTreeMap, HashMap};
use std::path::{Component, Path, PathBuf};

use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;

use super::gguf::GgufSource;
use super::{Error, Result};

/// The tensors of a checkpoint on their way into a model.
///
/// A model [`take`](Self::take)s each tensor once, by name and expected shape, and
/// [`finish`](Self::finish)es: a tensor that is missing, misshapen or left over is an error that
/// names it. That catches a checkpoint of a different architecture which happens to share names.
#[derive(Debug)]
pub struct Weights {
    source: Source,
    /// What has not been taken yet: name to shape.
    pending: BTreeMap<String, Vec<usize>>,
    dtype: DType,
    device: Device,
}

enum Source {
    Safetensors { maps: Vec<MmapedSafetensors>, owners: HashMap<String, usize> },
    Gguf(GgufSource),
    Tensors(HashMap<String, Tensor>),
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Source::Safetensors { .. } => "Safetensors",
            Source::Gguf(_) => "Gguf",
            Source::Tensors(_) => "Tensors",
        })
    }
}

impl Weights {
    /// Opens the safetensors of a checkpoint folder: `model.safetensors`, else the files that
    /// `model.safetensors.index.json` lists, else every `*.safetensors`. Tensors are converted to
    /// `dtype` on `device` as they are taken.
    ///
    /// The files are memory-mapped while loading; they must not be changed meanwhile.
    ///
    /// # Errors
    /// No file, an unreadable or damaged file, an index that disagrees with its files, a tensor in
    /// two files, a `dtype` the backend does not compute in.
    pub fn open(folder: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<Self> {
        let folder = folder.as_ref();
        let single = folder.join("model.safetensors");
        let index = folder.join("model.safetensors.index.json");
        if single.exists() {
            return Self::from_files(&[single], dtype, device);
        }
        if index.exists() {
            let listed = read_index(&index)?;
            let mut files: Vec<PathBuf> = listed.values().cloned().collect();
            files.sort();
            files.dedup();
            let weights = Self::from_files(&files, dtype, device)?;
            if let Some((name, file)) =
                listed.iter().find(|(name, _)| !weights.pending.contains_key(*name))
            {
                return Err(Error::config(
                    format!("weight_map.{name}"),
                    file.display(),
                    "a file that holds this tensor",
                ));
            }
            return Ok(weights);
        }
        let mut files = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(Error::io(folder))? {
            let path = entry.map_err(Error::io(folder))?.path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                files.push(path);
            }
        }
        if files.is_empty() {
            return Err(Error::config(
                "checkpoint",
                format!("no weights in {}", folder.display()),
                "model.safetensors, model.safetensors.index.json or *.safetensors",
            ));
        }
        files.sort();
        Self::from_files(&files, dtype, device)
    }

    /// Opens the given safetensors files as one checkpoint.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    #[allow(unsafe_code)]
    pub fn from_files(files: &[PathBuf], dtype: DType, device: &Device) -> Result<Self> {
        let mut maps = Vec::with_capacity(files.len());
        let mut owners: HashMap<String, usize> = HashMap::new();
        let mut pending = BTreeMap::new();
        for (index, file) in files.iter().enumerate() {
            // SAFETY: the map is read-only and every tensor is copied out of it while loading; the
            // caller is told not to change the files meanwhile.
            let map = unsafe { MmapedSafetensors::new(file)? };
            for (name, view) in map.tensors() {
                pending.insert(name.clone(), view.shape().to_vec());
                if let Some(first) = owners.insert(name.clone(), index) {
                    let (first, second) = (files[first].clone(), file.clone());
                    return Err(Error::DuplicateTensor { name, first, second });
                }
            }
            maps.push(map);
        }
        Self::new(Source::Safetensors { maps, owners }, pending, dtype, device)
    }

    /// Takes tensors that are in memory already (a test, a converted checkpoint).
    ///
    /// # Errors
    /// A `dtype` the backend does not compute in.
    pub fn from_tensors(
        tensors: HashMap<String, Tensor>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let pending = tensors.iter().map(|(name, t)| (name.clone(), t.dims().to_vec())).collect();
        Self::new(Source::Tensors(tensors), pending, dtype, device)
    }

    pub(super) fn from_gguf(source: GgufSource, dtype: DType, device: &Device) -> Result<Self> {
        let pending = source.shapes();
        Self::new(Source::Gguf(source), pending, dtype, device)
    }

    fn new(
        source: Source,
        pending: BTreeMap<String, Vec<usize>>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            return Err(Error::UnsupportedDtype { found: dtype });
        }
        Ok(Self { source, pending, dtype, device: device.clone() })
    }

    /// The type that tensors are converted to.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The device that tensors are put on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether a tensor of this name has not been taken yet.
    pub fn contains(&self, name: &str) -> bool {
        self.pending.contains_key(name)
    }

    /// Removes a tensor and returns it on the device in the type of the model.
    ///
    /// # Errors
    /// It is missing (or was taken before), has another shape, is stored in a type that is no
    /// floating-point weight, or cannot be read.
    pub fn take(&mut self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.take_as(name, shape, self.dtype)
    }

    /// Like [`take`](Self::take), in another type than the rest of the model.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn take_as(&mut self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.skip(name, shape)?;
        let tensor = match &mut self.source {
            Source::Safetensors { maps, owners } => {
                let map = &maps[owners[name]];
                let view = map.get(name)?;
                if !matches!(view.dtype(), Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16) {
                    return Err(no_weight(name, view.dtype()));
                }
                map.load(name, &self.device)?
            }
            Source::Gguf(gguf) => gguf.load(name, &self.device)?,
            Source::Tensors(tensors) => {
                let tensor = tensors.remove(name).ok_or_else(|| Error::MissingTensor {
                    name: name.to_owned(),
                    expected: shape.to_vec(),
                })?;
                if !matches!(tensor.dtype(), DType::F64 | DType::F32 | DType::F16 | DType::BF16) {
                    return Err(no_weight(name, tensor.dtype()));
                }
                // Detached: a tensor of a training variable would keep its graph alive in the cache.
                tensor.detach().to_device(&self.device)?
            }
        };
        Ok(tensor.to_dtype(dtype)?.contiguous()?)
    }

    /// Leaves a tensor out on purpose (a copy of the tied embedding), if its shape is as expected.
    ///
    /// # Errors
    /// It is missing or has another shape.
    pub fn skip(&mut self, name: &str, shape: &[usize]) -> Result<()> {
        match self.pending.get(name) {
            None => Err(Error::MissingTensor { name: name.to_owned(), expected: shape.to_vec() }),
            Some(found) if found != shape => Err(Error::TensorShape {
                name: name.to_owned(),
                found: found.clone(),
                expected: shape.to_vec(),
            }),
            Some(_) => {
                self.pending.remove(name);
                Ok(())
            }
        }
    }

    /// Leaves out every tensor whose name starts with `prefix`: a part of the checkpoint that the
    /// model does without.
    pub(crate) fn skip_all(&mut self, prefix: &str) {
        self.pending.retain(|name, _| !name.starts_with(prefix));
    }

    /// Ends loading.
    ///
    /// # Errors
    /// Tensors that nobody took, other than `*.rotary_emb.inv_freq`: buffers that old exports
    /// carry and that follow from the configuration.
    pub fn finish(self) -> Result<()> {
        let names: Vec<String> = self
            .pending
            .into_keys()
            .filter(|name| !name.ends_with(".rotary_emb.inv_freq"))
            .collect();
        if names.is_empty() { Ok(()) } else { Err(Error::UnknownTensors { names }) }
    }
}

/// The error of a tensor that is stored as `found`.
fn no_weight(name: &str, found: impl std::fmt::Debug) -> Error {
    let (name, found) = (name.to_owned(), format!("{found:?}"));
    Error::TensorType { name, found, accepted: "F64, F32, F16, BF16" }
}

/// `weight_map` of an index file: tensor name to file, which must lie beside the index.
fn read_index(index: &Path) -> Result<BTreeMap<String, PathBuf>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, PathBuf>,
    }
    let text = std::fs::read_to_string(index).map_err(Error::io(index))?;
    let listed: Index = serde_json::from_str(&text)
        .map_err(|source| Error::Json { path: index.to_owned(), source })?;
    let folder = index.parent().unwrap_or(Path::new(""));
    listed
        .weight_map
        .into_iter()
        .map(|(name, file)| {
            let mut parts = file.components();
            match (parts.next(), parts.next()) {
                (Some(Component::Normal(_)), None) => Ok((name, folder.join(file))),
                _ => Err(Error::config(
                    format!("weight_map.{name}"),
                    file.display(),
                    "the name of a file in the same folder",
                )),
            }
        })
        .collect()
}
