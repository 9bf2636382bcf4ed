//! Where the models run, and in which type.

use candle_core::{DType, Device};

/// Options for the device.
#[derive(Clone, Debug, clap::Args)]
pub struct DeviceArgs {
    /// Where to run: cpu, cuda, or cuda:N for the N-th GPU (needs `--features candle-core/cuda,candle-nn/cuda`)
    #[arg(long, value_name = "DEVICE", default_value = "cpu", value_parser = device)]
    pub device: Device,

    /// Type of weights and caches: f32, bf16 or f16. Only f32 makes every algorithm's text the same for certain
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = dtype)]
    pub dtype: DType,
}

impl DeviceArgs {
    /// For people: `cpu, f32`.
    pub fn describe(&self) -> String {
        let device = match self.device.location() {
            candle_core::DeviceLocation::Cpu => "cpu".to_owned(),
            candle_core::DeviceLocation::Cuda { gpu_id } => format!("cuda:{gpu_id}"),
            candle_core::DeviceLocation::Metal { gpu_id } => format!("metal:{gpu_id}"),
        };
        format!("{device}, {}", self.dtype.as_str())
    }
}

fn device(name: &str) -> Result<Device, String> {
    let ordinal = match name {
        "cpu" => return Ok(Device::Cpu),
        "cuda" => 0,
        _ => name
            .strip_prefix("cuda:")
            .and_then(|ordinal| ordinal.parse().ok())
            .ok_or("accepted: cpu, cuda, cuda:N")?,
    };
    if !candle_core::utils::cuda_is_available() {
        return Err("this build of candle has no CUDA support: add `--features \
                    candle-core/cuda,candle-nn/cuda`, or see the example bench_cuda for the engine \
                    of the feature `cuda`"
            .to_owned());
    }
    Device::new_cuda(ordinal).map_err(|error| error.to_string())
}

fn dtype(name: &str) -> Result<DType, String> {
    match name {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::BF16),
        "f16" => Ok(DType::F16),
        _ => Err("accepted: f32, bf16, f16".to_owned()),
    }
}
