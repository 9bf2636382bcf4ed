//! Matrix products, by cuBLASLt.

use std::cell::RefCell;
use std::collections::{HashMap, hash_map::Entry};
use std::ffi::c_void;

use candle_core::DType;
use cudarc::cublaslt::{result as lt, sys};
use cudarc::driver::sys::CUdeviceptr;

use super::device::{Buffer, Gpu};
use crate::candle::Result;

/// What algorithms may use besides their operands. Hopper's want up to 32 MiB.
pub(super) const WORKSPACE: usize = 32 << 20;

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

/// The library, and how it does every shape seen.
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
    pub(super) fn product(
        &self,
        x: CUdeviceptr,
        w: &Buffer,
        y: &Buffer,
        shape: Product,
    ) -> Result<()> {
        let row_bytes = shape.inputs * shape.dtype.size_in_bytes();
        assert!(
            (shape.skipped + shape.outputs) * row_bytes <= w.bytes(),
            "the weight has its shape"
        );
        let result_bytes = shape.rows * shape.outputs * shape.y_dtype.size_in_bytes();
        assert!(result_bytes <= y.bytes(), "the result fits");
        let operands = Operands { x, w: w.at(shape.skipped * row_bytes), y: y.pointer() };
        self.bind()?;
        let products = self.products();
        let mut plans = products.plans.borrow_mut();
        let plan = match plans.entry(shape) {
            Entry::Occupied(plan) => plan.into_mut(),
            Entry::Vacant(place) => place.insert(Plan::new(products.handle, shape)?),
        };
        plan.run(self, products.handle, operands)
    }
}

/// How cuBLASLt does the products of one shape.
struct Plan {
    description: Description,
    w: Layout,
    x: Layout,
    y: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
    add: bool,
}

impl Plan {
    /// cuBLAS counts columns first, so it is told to compute `y^T = w x^T`.
    fn new(handle: sys::cublasLtHandle_t, shape: Product) -> Result<Self> {
        let Product { rows, inputs, outputs, dtype, y_dtype, .. } = shape;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description = Description(lt::create_matmul_desc(compute, data_type(DType::F32))?);
        let w = Layout::new(dtype, inputs, outputs)?;
        let x = Layout::new(dtype, inputs, rows)?;
        let y = Layout::new(y_dtype, outputs, rows)?;
        let preference = Preference(lt::create_matmul_pref()?);
        let (transposed, workspace) = (TRANSPOSED, WORKSPACE as u64);
        // SAFETY: every attribute is given a value of its type.
        let found = unsafe {
            lt::set_matmul_desc_attribute(
                description.0,
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
            lt::get_matmul_algo_heuristic(handle, description.0, w.0, x.0, y.0, y.0, preference.0)?
        };
        Ok(Self { description, w, x, y, algorithm: found.algo, add: shape.add })
    }

    fn run(&self, gpu: &Gpu, handle: sys::cublasLtHandle_t, operands: Operands) -> Result<()> {
        let (one, old) = (1.0f32, if self.add { 1.0f32 } else { 0.0 });
        let (workspace, stream) = gpu.workspace();
        // SAFETY: `product` checked the operands against the shape that the layouts were made for; the workspace is as
        // large as the algorithms were asked to make do with.
        unsafe {
            lt::matmul(
                handle,
                self.description.0,
                (&raw const one).cast(),
                (&raw const old).cast(),
                operands.w as *const c_void,
                self.w.0,
                operands.x as *const c_void,
                self.x.0,
                operands.y as *const c_void,
                self.y.0,
                operands.y as *mut c_void,
                self.y.0,
                &raw const self.algorithm,
                workspace as *mut c_void,
                WORKSPACE,
                stream.cast(),
            )?;
        }
        Ok(())
    }
}

struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    /// A matrix without gaps, columns first.
    fn new(dtype: DType, rows: usize, columns: usize) -> Result<Self> {
        let (height, width) = (rows as u64, columns as u64);
        Ok(Self(lt::create_matrix_layout(data_type(dtype), height, width, rows as i64)?))
    }
}

struct Description(sys::cublasLtMatmulDesc_t);

struct Preference(sys::cublasLtMatmulPreference_t);

macro_rules! destroy {
    ($($owner:ident by $destroy:ident),*) => {$(
        impl Drop for $owner {
            fn drop(&mut self) {
                // SAFETY: made where it was wrapped. There is no one to tell of an error.
                let _ = unsafe { lt::$destroy(self.0) };
            }
        }
    )*};
}

destroy!(
    Layout by destroy_matrix_layout,
    Description by destroy_matmul_desc,
    Preference by destroy_matmul_pref
);

fn data_type(dtype: DType) -> sys::cudaDataType_t {
    match dtype {
        DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        _ => sys::cudaDataType_t::CUDA_R_32F,
    }
}
