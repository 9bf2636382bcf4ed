//! Compiles the CUDA kernels: to code for two architectures with PTX, which the driver turns into code for GPUs of
//! others, or to code for one architecture. Does nothing without the feature `cuda`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

const KERNELS: &str = "src/candle/cuda/kernels";

/// Architectures. Code runs on GPUs of the same major version, PTX on all later ones. The first has all that the kernels
/// need; the second lets a kernel be started while the one before it still runs.
const PORTABLE: [(&str, &str); 2] = [
    ("80", "-gencode=arch=compute_80,code=[sm_80,compute_80]"),
    ("90", "-gencode=arch=compute_90,code=[sm_90,compute_90]"),
];

/// Kernels with instructions of one architecture alone: PTX would run nowhere else either.
const HOPPER_KERNELS: &str = "src/candle/cuda/kernels/hopper";
const HOPPER: [&str; 2] = ["-cubin", "-gencode=arch=compute_90a,code=sm_90a"];

/// What `product.cu` is compiled for, each in a file of its own.
const OUTPUTS: [&str; 6] = ["Elements", "Floats", "Added", "Gated", "Greatest", "Summarized"];
const TYPES: [&str; 2] = ["bf16", "f16"];

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    println!("cargo:rerun-if-changed={KERNELS}");
    for variable in ["NVCC", "CUDA_HOME", "CUDA_PATH"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    let nvcc = nvcc();
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let running: Vec<_> = jobs()
        .map(|Job { source, name, arguments }| {
            let child = Command::new(&nvcc)
                .args(["-O3", "-std=c++17"])
                .args(arguments)
                .arg("-o")
                .args([&out.join(name), &source])
                .spawn()
                .unwrap_or_else(|error| {
                    panic!(
                        "the feature `cuda` needs nvcc of CUDA 12.1 or later; running {} failed: {error}. \
                         Set NVCC to its path or CUDA_HOME to its toolkit.",
                        nvcc.display()
                    )
                });
            (source, child)
        })
        .collect();
    for (source, mut child) in running {
        let status = child.wait().expect("nvcc can be waited for");
        assert!(status.success(), "nvcc failed on {}: {status}", source.display());
    }
}

/// A file to be compiled, and the name of what it becomes.
struct Job {
    source: PathBuf,
    name: String,
    arguments: Vec<String>,
}

fn jobs() -> impl Iterator<Item = Job> {
    let stem = |source: &Path| source.file_stem().expect("a file has a name").display().to_string();
    let strings = |arguments: &[&str]| arguments.iter().map(|&x| x.to_owned()).collect();
    let portable = sources(KERNELS).flat_map(move |source| {
        PORTABLE.map(|(name, code)| Job {
            name: format!("{}.{name}.fatbin", stem(&source)),
            source: source.clone(),
            arguments: strings(&["-fatbin", code]),
        })
    });
    let hopper = sources(HOPPER_KERNELS).flat_map(move |source| {
        let name = stem(&source);
        let job = |name: String, defined: Vec<String>| Job {
            source: source.clone(),
            name: format!("{name}.90a.cubin"),
            arguments: [strings(&HOPPER), defined].concat(),
        };
        if name != "product" {
            return vec![job(name, Vec::new())];
        }
        let each = OUTPUTS.iter().flat_map(|output| TYPES.map(|dtype| (output, dtype)));
        each.map(|(output, dtype)| {
            let defined = vec![
                format!("-DPRODUCT_OUTPUT=Output::{output}"),
                format!("-DPRODUCT_TYPE={dtype}"),
            ];
            job(format!("product_{}_{dtype}", output.to_lowercase()), defined)
        })
        .collect()
    });
    portable.chain(hopper)
}

fn sources(folder: &str) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(folder).expect("the kernels are beside build.rs");
    entries
        .map(|entry| entry.expect("the folder can be read").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
}

fn nvcc() -> PathBuf {
    if let Some(nvcc) = env::var_os("NVCC") {
        return nvcc.into();
    }
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    let on_path = env::var_os("PATH").into_iter().flat_map(|path| {
        env::split_paths(&path).map(|folder| folder.join("nvcc")).collect::<Vec<_>>()
    });
    homes
        .map(|home| home.join("bin/nvcc"))
        .chain(on_path)
        .chain([Path::new("/usr/local/cuda/bin/nvcc").into()])
        .find(|nvcc| nvcc.exists())
        .unwrap_or_else(|| "nvcc".into())
}
