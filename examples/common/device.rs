//! Where the models run, and in which type.

use candle_core::DType;

/// Options for the device.
#[derive(Clone, Debug, clap::Args)]
pub struct DeviceArgs {
    /// Where to run: cpu, cuda, or cuda:N for the N-th GPU (needs `--features cuda`)
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = place)]
    pub device: Place,

    /// Type of weights and caches: f32, bf16 or f16. Only f32 makes every algorithm's text the same for certain
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = dtype)]
    pub dtype: DType,
}

/// A processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Cpu,
    /// The GPU with this number.
    #[cfg(feature = "cuda")]
    Cuda(usize),
}

impl DeviceArgs {
    /// For people: `cpu, f32`.
    pub fn describe(&self) -> String {
        let device = match self.device {
            Place::Cpu => "cpu".to_owned(),
            #[cfg(feature = "cuda")]
            Place::Cuda(ordinal) => format!("cuda:{ordinal}"),
        };
        format!("{device}, {}", self.dtype.as_str())
    }
}

fn place(name: &str) -> Result<Place, String> {
    let ordinal = match name {
        "cpu" => return Ok(Place::Cpu),
        "cuda" => 0,
        _ => name
            .strip_prefix("cuda:")
            .and_then(|ordinal| ordinal.parse().ok())
            .ok_or("accepted: cpu, cuda, cuda:N")?,
    };
    gpu(ordinal)
}

#[cfg(feature = "cuda")]
fn gpu(ordinal: usize) -> Result<Place, String> {
    Ok(Place::Cuda(ordinal))
}

#[cfg(not(feature = "cuda"))]
fn gpu(_: usize) -> Result<Place, String> {
    Err("this build has no GPU engine: build it with `--features cuda`".to_owned())
}

fn dtype(name: &str) -> Result<DType, String> {
    match name {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::BF16),
        "f16" => Ok(DType::F16),
        _ => Err("accepted: f32, bf16, f16".to_owned()),
    }
}
