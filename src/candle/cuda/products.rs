//! Matrix products: by cuBLASLt, or by [`Tiles`] where that is faster.

use std::cell::RefCell;
use std::collections::{HashMap, hash_map::Entry};
use std::ffi::c_void;

use candle_core::DType;
use cudarc::cublaslt::{result as lt, sys};
use cudarc::driver::sys::CUdeviceptr;

use super::device::{Buffer, Gpu, Pinned};
use super::kernels::{Argmax, Kernels, TopK};
use super::tiles::Tiles;
use crate::candle::Result;

/// What algorithms may use besides their operands. Hopper's want up to 32 MiB.
pub(super) const WORKSPACE: usize = 32 << 20;

/// Algorithms of the library that are timed for a shape at most, and on how many weights.
const CANDIDATES: usize = 16;
const TIMED_WEIGHTS: usize = 8;

/// How often something is timed: for so many milliseconds, within these bounds.
const TIMED_MILLISECONDS: f64 = 4.0;
const TIMED_RUNS: (f64, f64) = (3.0, 10.0);

/// Ways of ours that are kept for the choice in a whole pass, and how much of the pass's time a way may leave to be taken.
const KEPT_TILES: usize = 4;
const FASTER: f64 = 0.997;

/// `CUBLAS_OP_T`.
const TRANSPOSED: i32 = 1;

/// Sizes and types of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Product {
    pub(super) rows: usize,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) dtype: DType,
    pub(super) output: Output,
    /// Weights of the shape that a pass goes through: few are found in the L2 cache again, and done otherwise than many.
    pub(super) weights: usize,
}

impl Product {
    /// Whether its sums are left as they are.
    fn is_f32(&self) -> bool {
        self.dtype == DType::F32 || !matches!(self.output, Output::Elements | Output::Gated)
    }
}

/// What becomes of a product's sums. The numbers are those of the modules with the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Output {
    /// `[rows, outputs]` of the product's type.
    Elements = 0,
    /// The same, of f32.
    Floats = 1,
    /// They are added to `[rows, outputs]` of f32.
    Added = 2,
    /// Outputs are eight gates, the eight ups of the same elements and so on, of which `silu(gate) * up` is wanted:
    /// `[rows, outputs / 2]` of the product's type.
    Gated = 3,
    /// The greatest of each row, of equal ones the one with the lowest index.
    Greatest = 4,
    /// Floats, and the summaries that [`TopK`] selects from.
    Summarized = 5,
}

impl Output {
    /// Whether it is found by looking at whole sums, so that blocks cannot share out the inputs.
    pub(super) fn is_of_whole(self) -> bool {
        matches!(self, Self::Greatest | Self::Summarized)
    }
}

/// An [`Output`] and where it goes.
#[derive(Clone, Copy)]
pub(super) enum Sums<'a> {
    Elements(&'a Buffer),
    Floats(&'a Buffer),
    Added(&'a Buffer),
    /// With memory for gates and ups, where the product leaves them to be combined.
    Gated {
        y: &'a Buffer,
        gate_up: &'a Buffer,
        kernels: &'a Kernels,
    },
    /// With memory for logits, where the product leaves them to be searched.
    Greatest {
        picks: &'a Pinned<u64>,
        argmax: &'a Argmax,
        logits: &'a Buffer,
    },
    Summarized {
        logits: &'a Buffer,
        top_k: &'a TopK,
    },
}

impl<'a> Sums<'a> {
    pub(super) fn output(&self) -> Output {
        match self {
            Self::Elements(_) => Output::Elements,
            Self::Floats(_) => Output::Floats,
            Self::Added(_) => Output::Added,
            Self::Gated { .. } => Output::Gated,
            Self::Greatest { .. } => Output::Greatest,
            Self::Summarized { .. } => Output::Summarized,
        }
    }

    /// Where [`Tiles`] leave what they make of sums, and what it takes per row; and where the library leaves all sums.
    fn places(self, outputs: usize, element: usize) -> (&'a Buffer, usize, &'a Buffer) {
        let all = outputs * element;
        match self {
            Self::Elements(y) | Self::Floats(y) | Self::Added(y) => (y, all, y),
            Self::Gated { y, gate_up, .. } => (y, all / 2, gate_up),
            Self::Greatest { argmax, logits, .. } => {
                (argmax.bests(), Argmax::bytes(1, outputs), logits)
            }
            Self::Summarized { logits, .. } => (logits, all, logits),
        }
    }
}

/// The library, and how it does every shape seen.
pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    plans: RefCell<HashMap<Product, Plan>>,
}

/// Operands of a product, by address.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub(super) x: CUdeviceptr,
    pub(super) w: CUdeviceptr,
    pub(super) y: CUdeviceptr,
    /// Of [`Output::Summarized`].
    pub(super) summaries: CUdeviceptr,
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
    /// Asks for `x w^T`: `x` is `[rows, inputs]`, `w` `[outputs, inputs]`, both of type `dtype`; `sums` are of
    /// `shape.output`. Sums are f32.
    pub(super) fn product(
        &self,
        x: CUdeviceptr,
        w: &Buffer,
        sums: Sums<'_>,
        shape: Product,
    ) -> Result<()> {
        self.bind()?;
        let products = self.products();
        let mut plans = products.plans.borrow_mut();
        let plan = match plans.entry(shape) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(Plan::new(products.handle, shape)?),
        };
        plan.run(self, products.handle, (x, w, sums), 0)
    }

    /// Finds fast ways to do the products of a shape, unless they have been done before. What `sums` holds is lost.
    /// `weights` are those of the shape that a pass goes through, or the first of them. `before` asks for a kernel like
    /// the one before the product: what is done ahead of its end differs from way to way.
    ///
    /// In f32 the library's first choice stays.
    pub(super) fn plan_product(
        &self,
        x: CUdeviceptr,
        weights: &[&Buffer],
        sums: Sums<'_>,
        shape: Product,
        before: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let products = self.products();
        if shape.dtype == DType::F32 || products.plans.borrow().contains_key(&shape) {
            return Ok(());
        }
        self.bind()?;
        let weights = &weights[..weights.len().min(TIMED_WEIGHTS)];
        let mut plan = Plan::new(products.handle, shape)?;
        let library = plan.ways.len();
        plan.ways.extend(Tiles::ways(self, &shape)?.into_iter().map(Way::Tiles));
        let mut timed = Vec::with_capacity(plan.ways.len());
        let mut failed = None;
        for candidate in 0..plan.ways.len() {
            let work = || {
                weights.iter().try_for_each(|&w| {
                    before()?;
                    plan.run(self, products.handle, (x, w, sums), candidate)
                })
            };
            match self.time_if_it_works(&work)? {
                Ok(time) => timed.push((time, candidate)),
                Err(error) => failed = Some(error),
            }
        }
        if let (true, Some(error)) = (timed.is_empty(), failed) {
            return Err(error);
        }
        timed.sort_by(|a, b| a.0.total_cmp(&b.0));
        let ours = timed.iter().filter(|(_, at)| *at >= library).take(KEPT_TILES);
        let librarys = timed.iter().filter(|(_, at)| *at < library).take(1);
        let kept: Vec<usize> = ours.chain(librarys).map(|&(_, at)| at).collect();
        let mut ways: Vec<_> = std::mem::take(&mut plan.ways).into_iter().map(Some).collect();
        plan.ways = kept.iter().filter_map(|&at| ways[at].take()).collect();
        plan.settled = plan.ways.len() < 2;
        products.plans.borrow_mut().insert(shape, plan);
        Ok(())
    }

    /// Chooses among the ways that were planned for `shapes` by what the whole pass takes, unless that has been done
    /// before: from then on products are done that way, so that results of one `Gpu` can be repeated. `pass` asks for
    /// a pass, any number of times.
    ///
    /// A way that is fast by itself need not be so here: ours begin before the kernel ahead of them is done, and room
    /// for that depends on the kernel.
    pub(super) fn settle(&self, shapes: &[Product], pass: &dyn Fn() -> Result<()>) -> Result<()> {
        let plans = &self.products().plans;
        let unsettled = |shape: &&Product| plans.borrow().get(*shape).is_some_and(|p| !p.settled);
        let shapes: Vec<_> = shapes.iter().filter(unsettled).collect();
        if shapes.is_empty() {
            return Ok(());
        }
        let swap = |shape: &Product, candidate| {
            if let Some(plan) = plans.borrow_mut().get_mut(shape) {
                plan.ways.swap(0, candidate);
            }
        };
        let time_with = |shape: &Product, candidate| {
            swap(shape, candidate);
            let time = self.time_if_it_works(pass);
            swap(shape, candidate);
            // What does not work in a pass is no way.
            time.map(|time| time.unwrap_or(f64::INFINITY))
        };
        let mut best = self.time_captured(pass)?;
        for shape in shapes {
            let candidates = plans.borrow()[shape].ways.len();
            for candidate in 1..candidates {
                let mut time = time_with(shape, candidate)?;
                if time < best * FASTER {
                    // The GPU's clock changes: once more, one right after the other.
                    best = self.time_captured(pass)?;
                    time = time_with(shape, candidate)?;
                }
                if time < best * FASTER {
                    best = time;
                    swap(shape, candidate);
                }
            }
            if let Some(plan) = plans.borrow_mut().get_mut(shape) {
                plan.settled = true;
            }
        }
        Ok(())
    }

    /// What [`time_captured`](Self::time_captured) finds of a way that may turn out not to work. The GPU has to, from then
    /// on.
    fn time_if_it_works(&self, work: &dyn Fn() -> Result<()>) -> Result<Result<f64>> {
        let time = self.time_captured(work);
        if time.is_err() {
            self.synchronize()?;
        }
        Ok(time)
    }

    /// Milliseconds of work that is captured and replayed; the least of a few times.
    fn time_captured(&self, work: &dyn Fn() -> Result<()>) -> Result<f64> {
        let graph = self.capture(work)?;
        let first = self.time(|| graph.launch())?;
        let runs = (TIMED_MILLISECONDS / first).clamp(TIMED_RUNS.0, TIMED_RUNS.1) as usize;
        (1..runs).try_fold(first, |least, _| Ok(least.min(self.time(|| graph.launch())?)))
    }
}

/// How the products of one shape are done.
struct Plan {
    shape: Product,
    /// The first is used.
    ways: Vec<Way>,
    /// Whether that is final. Unless they have been timed, it is the library's choice.
    settled: bool,
    description: Description,
    w: Layout,
    x: Layout,
    y: Layout,
}

enum Way {
    Library(sys::cublasLtMatmulAlgo_t),
    Tiles(Tiles),
}

impl Plan {
    /// With the ways that the library knows, what it thinks best first.
    ///
    /// cuBLAS counts columns first, so it is told to compute `y^T = w x^T`.
    fn new(handle: sys::cublasLtHandle_t, shape: Product) -> Result<Self> {
        let Product { rows, inputs, outputs, dtype, .. } = shape;
        let y_dtype = if shape.is_f32() { DType::F32 } else { dtype };
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let description = Description(lt::create_matmul_desc(compute, data_type(DType::F32))?);
        let w = Layout::new(dtype, inputs, outputs)?;
        let x = Layout::new(dtype, inputs, rows)?;
        let y = Layout::new(y_dtype, outputs, rows)?;
        let preference = Preference(lt::create_matmul_pref()?);
        let (transposed, workspace) = (TRANSPOSED, WORKSPACE as u64);
        let reductions =
            sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
        let mut found = Vec::with_capacity(CANDIDATES);
        // SAFETY: every attribute is given a value of its type, and there is room for the results; those there are
        // have been written.
        unsafe {
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
            lt::set_matmul_pref_attribute(
                preference.0,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                (&raw const reductions).cast(),
                size_of_val(&reductions),
            )?;
            let mut written = 0;
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                description.0,
                w.0,
                x.0,
                y.0,
                y.0,
                preference.0,
                CANDIDATES as i32,
                found.as_mut_ptr(),
                &raw mut written,
            )
            .result()?;
            found.set_len(written as usize);
        }
        if found.is_empty() {
            sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED.result()?;
        }
        let way = |found: sys::cublasLtMatmulHeuristicResult_t| Way::Library(found.algo);
        let ways = found.into_iter().map(way).collect();
        Ok(Self { shape, ways, settled: true, description, w, x, y })
    }

    fn run(
        &self,
        gpu: &Gpu,
        handle: sys::cublasLtHandle_t,
        (x, w, sums): (CUdeviceptr, &Buffer, Sums<'_>),
        candidate: usize,
    ) -> Result<()> {
        let Product { rows, inputs, outputs, dtype, output, .. } = self.shape;
        assert_eq!(sums.output(), output, "the sums have a place");
        let w_bytes = outputs * inputs * dtype.size_in_bytes();
        assert!(w_bytes <= w.bytes(), "the weight has its shape");
        let element = if self.shape.is_f32() { 4 } else { dtype.size_in_bytes() };
        let (y, row_bytes, all) = sums.places(outputs, element);
        assert!(rows * row_bytes <= y.bytes(), "the result fits");
        let w = w.pointer();
        let algorithm = match &self.ways[candidate] {
            Way::Library(algorithm) => algorithm,
            Way::Tiles(tiles) => {
                let summaries = match sums {
                    Sums::Summarized { top_k, .. } => top_k.summaries(rows),
                    _ => 0,
                };
                tiles.run(gpu, &self.shape, Operands { x, w, y: y.pointer(), summaries })?;
                return match sums {
                    Sums::Greatest { picks, argmax, .. } => {
                        argmax.run_on_parts(gpu, rows, tiles.parts(outputs), picks)
                    }
                    _ => Ok(()),
                };
            }
        };
        assert!(rows * outputs * element <= all.bytes(), "the sums fit");
        let y = all.pointer();
        let (one, old) = (1.0f32, if output == Output::Added { 1.0f32 } else { 0.0 });
        let (workspace, stream) = gpu.workspace();
        // SAFETY: the operands were checked against the shape that the layouts were made for; the workspace is as large as
        // the algorithms were asked to make do with.
        unsafe {
            lt::matmul(
                handle,
                self.description.0,
                (&raw const one).cast(),
                (&raw const old).cast(),
                w as *const c_void,
                self.w.0,
                x as *const c_void,
                self.x.0,
                y as *const c_void,
                self.y.0,
                y as *mut c_void,
                self.y.0,
                algorithm,
                workspace as *mut c_void,
                WORKSPACE,
                stream.cast(),
            )?;
        }
        // What the library leaves to be done.
        match sums {
            Sums::Gated { y, gate_up, kernels } => {
                kernels.silu_mul(gpu, gate_up, y, rows * outputs / 2)
            }
            Sums::Greatest { picks, argmax, logits } => argmax.run(gpu, logits, rows, picks),
            Sums::Summarized { logits, top_k } => top_k.summarize(gpu, logits.pointer(), 0..rows),
            Sums::Elements(_) | Sums::Floats(_) | Sums::Added(_) => Ok(()),
        }
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
