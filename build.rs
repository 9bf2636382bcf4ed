//! Compiles the CUDA kernels: to PTX, which the driver turns into code for the GPU it finds, or to code for one
//! architecture. Does nothing without the feature `cuda`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

const KERNELS: &str = "src/candle/cuda/kernels";

/// PTX runs on the architecture that it was made for and on all later ones. The first has all that the kernels need;
/// the second lets a kernel be started while the one before it still runs.
const PTX: [&[&str]; 2] =
    [&["80.ptx", "-ptx", "-arch=compute_80"], &["90.ptx", "-ptx", "-arch=compute_90"]];

/// Kernels with instructions of one architecture alone: PTX would run nowhere else either.
const HOPPER_KERNELS: &str = "src/candle/cuda/kernels/hopper";
const HOPPER: [&[&str]; 1] = [&["90a.cubin", "-cubin", "-gencode=arch=compute_90a,code=sm_90a"]];

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
    let running: Vec<_> = [(KERNELS, &PTX[..]), (HOPPER_KERNELS, &HOPPER)]
        .into_iter()
        .flat_map(|(folder, forms)| {
            sources(folder).flat_map(|source| forms.iter().map(move |form| (source.clone(), form)))
        })
        .map(|(source, form)| {
            let name = source.with_extension(form[0]);
            let child = Command::new(&nvcc)
                .args(["-O3", "-std=c++17"])
                .args(&form[1..])
                .arg("-o")
                .args([&out.join(name.file_name().expect("a file has a name")), &source])
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
