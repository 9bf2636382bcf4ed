//! Matrix products, each by the cuBLASLt algorithm that was measured to be the fastest for its shape.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;

use candle_core::DType;
use cudarc::cublaslt::{result as lt, sys};
use cudarc::driver::sys::CUdeviceptr;

use super::device::{Buffer, Gpu};
use crate::candle::{Error, Result};

/// What algorithms may use besides their operands. Hopper's want up to 32 MiB.
pub(super) const WORKSPACE: usize = 32 << 20;

/// Algorithms that are tried per shape, in the order in which cuBLASLt recommends them.
const CANDIDATES: usize = 12;

/// Times that each is measured.
const REPEATS: usize = 5;

/// More than the second-level cache of any GPU: what is between two uses of the same weight in a pass.
const FLUSH: usize = 128 << 20;

/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;

/// Sizes and types of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Product {
    pub(super) rows: usize,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    /// Rows at the beginning of the weight that are left out.
    pub(super) skipped: usize,
    pub(super) dtype: DType,
    pub(super) y_dtype: DType,
    /// Whether the product is added to what is there.
    pub(super) add: bool,
}

/// The library, and the algorithm of every shape seen.
pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    plans: RefCell<HashMap<Product, Plan>>,
}

/// Operands of a product, by address.
#[derive(Clone, Copy)]
struct Operands {
    x: CUdeviceptr,
    w: CUdeviceptr,
    y: CUdeviceptr,
}

impl Products {
    pub(super) fn new() -> Result<Self> {
        Ok(Self { handle: lt::create_handle()?, plans: RefCell::default() })
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        self.plans.borrow_mut().clear();
        // SAFETY: made in `new`. There is no one to tell of an error.
        let _ = unsafe { lt::destroy_handle(self.handle) };
    }
}

impl Gpu {
    /// Asks for `y = x w^T`, or `y += x w^T`: `x` is `[rows, inputs]`, `w` `[outputs, inputs]`, both of type `dtype`, `y`
    /// `[rows, outputs]` of type `y_dtype`. Sums are f32.
    ///
    /// A shape that comes up for the first time is measured, with these operands: `y` holds anything then if it is to
    /// be added to. f32 shapes are not: there the same sums on every run are worth more.
    pub(super) fn product(
        &self,
        x: CUdeviceptr,
        w: &Buffer,
        y: &Buffer,
        shape: Product,
    ) -> Result<()> {
        let row_bytes = shape.inputs * shape.dtype.size_in_bytes();
        assert!((shape.skipped + shape.outputs) * row_bytes <= w.bytes(), "the weight has its shape");
        let result_bytes = shape.rows * shape.outputs * shape.y_dtype.size_in_bytes();
        assert!(result_bytes <= y.bytes(), "the result fits");
        let operands = Operands { x, w: w.at(shape.skipped * row_bytes), y: y.pointer() };
        self.bind()?;
        let products = self.products();
        let mut plans = products.plans.borrow_mut();
        if !plans.contains_key(&shape) {
            plans.insert(shape, Plan::fastest(self, products.handle, shape, operands)?);
        }
        let plan = &plans[&shape];
        plan.run(self, products.handle, operands, &plan.algorithms[0])
    }
}

/// How cuBLASLt does the products of one shape.
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    /// The best first.
    algorithms: Vec<sys::cublasLtMatmulAlgo_t>,
    add: bool,
}

impl Plan {
    fn fastest(
        gpu: &Gpu,
        handle: sys::cublasLtHandle_t,
        shape: Product,
        operands: Operands,
    ) -> Result<Self> {
        let mut plan = Self::new(handle, shape)?;
        if shape.dtype == DType::F32 || plan.algorithms.len() == 1 {
            return Ok(plan);
        }
        let flush = gpu.allocate(FLUSH)?;
        let mut timed = Vec::with_capacity(plan.algorithms.len());
        for algorithm in &plan.algorithms {
            plan.run(gpu, handle, operands, algorithm)?;
            let mut times = Vec::with_capacity(REPEATS);
            for _ in 0..REPEATS {
                gpu.clear(&flush, FLUSH)?;
                times.push(gpu.time(|| plan.run(gpu, handle, operands, algorithm))?);
            }
            times.sort_by(f64::total_cmp);
            timed.push((times[REPEATS / 2], *algorithm));
        }
        timed.sort_by(|a, b| a.0.total_cmp(&b.0));
        plan.algorithms = timed.into_iter().map(|(_, algorithm)| algorithm).collect();
        Ok(plan)
    }

    /// cuBLAS counts columns first, so it is told to compute `y^T = w x^T`.
    fn new(handle: sys::cublasLtHandle_t, shape: Product) -> Result<Self> {
        let Product { rows, inputs, outputs, dtype, y_dtype, .. } = shape;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let layout = |dtype, rows: usize, columns: usize| {
            lt::create_matrix_layout(data_type(dtype), rows as u64, columns as u64, rows as i64)
        };
        let mut plan = Self {
            description: lt::create_matmul_desc(compute, sys::cudaDataType_t::CUDA_R_32F)?,
            layouts: [
                layout(dtype, inputs, outputs)?,
                layout(dtype, inputs, rows)?,
                layout(y_dtype, outputs, rows)?,
            ],
            algorithms: Vec::new(),
            add: shape.add,
        };
        let (transposed, workspace) = (TRANSPOSED, WORKSPACE as u64);
        let preference = Preference(lt::create_matmul_pref()?);
        let [w, x, y] = plan.layouts;
        // SAFETY: an all-zero result is a value of its type, of plain integers and floats.
        let mut found: [sys::cublasLtMatmulHeuristicResult_t; CANDIDATES] =
            unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: every attribute is given a value of its type; `found` has room for as many as are asked for.
        unsafe {
            lt::set_matmul_desc_attribute(
                plan.description,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )?;
            lt::set_matmul_pref_attribute(
                preference.0,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace).cast(),
                size_of_val(&workspace),
            )?;
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                plan.description,
                w,
                x,
                y,
                y,
                preference.0,
                CANDIDATES as i32,
                found.as_mut_ptr(),
                &raw mut count,
            )
            .result()?;
        }
        let usable = |found: &&sys::cublasLtMatmulHeuristicResult_t| found.state.result().is_ok();
        plan.algorithms =
            found[..count as usize].iter().filter(usable).map(|found| found.algo).collect();
        if plan.algorithms.is_empty() {
            let accepted = "a product that cuBLAS has an algorithm for";
            return Err(Error::argument("shape", format!("{shape:?}"), accepted));
        }
        Ok(plan)
    }

    fn run(
        &self,
        gpu: &Gpu,
        handle: sys::cublasLtHandle_t,
        operands: Operands,
        algorithm: &sys::cublasLtMatmulAlgo_t,
    ) -> Result<()> {
        let (one, old) = (1.0f32, if self.add { 1.0f32 } else { 0.0 });
        let [w, x, y] = self.layouts;
        let (workspace, stream) = gpu.workspace();
        // SAFETY: `product` checked the operands against the shape that the layouts were made for; the workspace is as
        // large as the algorithms were asked to make do with.
        unsafe {
            lt::matmul(
                handle,
                self.description,
                (&raw const one).cast(),
                (&raw const old).cast(),
                operands.w as *const c_void,
                w,
                operands.x as *const c_void,
                x,
                operands.y as *const c_void,
                y,
                operands.y as *mut c_void,
                y,
                algorithm,
                workspace as *mut c_void,
                WORKSPACE,
                stream.cast(),
            )?;
        }
        Ok(())
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made in `new`. There is no one to tell of an error.
        unsafe {
            let _ = lt::destroy_matmul_desc(self.description);
            for layout in self.layouts {
                let _ = lt::destroy_matrix_layout(layout);
            }
        }
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made where it was wrapped.
        let _ = unsafe { lt::destroy_matmul_pref(self.0) };
    }
}

fn data_type(dtype: DType) -> sys::cudaDataType_t {
    match dtype {
        DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        _ => sys::cudaDataType_t::CUDA_R_32F,
    }
}
