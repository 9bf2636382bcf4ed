//! A GPU as this backend uses it: one stream, and memory that is allocated once.

use std::ffi::c_void;
use std::fmt;
use std::hint::spin_loop;
use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use cudarc::cublaslt;
use cudarc::driver::{
    CudaContext, CudaFunction, CudaGraph, CudaModule, CudaStream, result,
    sys::{self, CUdeviceptr},
};
use cudarc::nvrtc::Ptx;

use super::products::{Products, WORKSPACE};
use crate::candle::{Error, Result};

/// Blocks of a kernel that is started early at most, unless they are clusters: more would be in each other's way.
pub(super) const EARLY_BLOCKS: u32 = 264;

/// How often a word is looked at before the driver is asked whether the GPU still works on it.
const LOOKS: usize = 1000;

/// A GPU. Clones are handles to the same one; everything made from it runs in one stream, in the order in which it
/// was asked for.
///
/// It stays on the thread that made it.
#[derive(Clone)]
pub struct Gpu(Rc<Inner>);

struct Inner {
    products: Products,
    modules: Modules,
    stream: Arc<CudaStream>,
    context: Arc<CudaContext>,
    workspace: CUdeviceptr,
    /// Whether there are clusters, and kernels can be started before the one ahead of them is done.
    clusters: bool,
}

pub(super) struct Modules {
    pub(super) attention: Arc<CudaModule>,
    pub(super) commit: Arc<CudaModule>,
    pub(super) couple: Arc<CudaModule>,
    pub(super) draw: Arc<CudaModule>,
    pub(super) norm: Arc<CudaModule>,
    pub(super) random: Arc<CudaModule>,
    pub(super) rope: Arc<CudaModule>,
    pub(super) select: Arc<CudaModule>,
    /// On GPUs of compute capability 9.0.
    pub(super) hopper: Option<HopperModules>,
}

/// Modules with instructions that other architectures lack.
pub(super) struct HopperModules {
    pub(super) attention: Arc<CudaModule>,
    /// By [`Output`](super::products::Output), in bf16 and in f16.
    pub(super) products: [[Arc<CudaModule>; 2]; 6],
}

/// Loads a file that `build.rs` left, of the name that the literals make.
macro_rules! compiled {
    ($context:expr, $($name:literal),+) => {{
        let code = include_bytes!(concat!(env!("OUT_DIR"), "/", $($name),+));
        $context.load_module(Ptx::from_binary(code.to_vec()))?
    }};
}

macro_rules! module {
    ($context:expr, $clusters:expr, $name:literal) => {
        if $clusters {
            compiled!($context, $name, ".90.fatbin")
        } else {
            compiled!($context, $name, ".80.fatbin")
        }
    };
}

macro_rules! product_modules {
    ($context:expr, $($output:literal),+) => {
        [$([
            compiled!($context, "product_", $output, "_bf16.90a.cubin"),
            compiled!($context, "product_", $output, "_f16.90a.cubin"),
        ]),+]
    };
}

impl Gpu {
    /// Opens the GPU with this number.
    ///
    /// # Errors
    /// No driver, no cuBLAS or no such GPU; one older than compute capability 8.0.
    pub fn new(ordinal: usize) -> Result<Self> {
        Self::open(ordinal, None)
    }

    /// As [`new`](Self::new), with the kernels for GPUs of this compute capability, if one is given.
    pub(super) fn open(ordinal: usize, kernels_for: Option<(i32, i32)>) -> Result<Self> {
        // SAFETY: these open the libraries and close them again.
        let (driver, cublas) =
            unsafe { (sys::is_culib_present(), cublaslt::sys::is_culib_present()) };
        if !driver || !cublas {
            return Err(Error::NoCuda {
                library: if driver { "cuBLAS" } else { "the CUDA driver" },
            });
        }
        let context = CudaContext::new(ordinal)?;
        let (major, minor) = context.compute_capability()?;
        if major < 8 {
            let found = format!("a GPU of compute capability {major}.{minor}");
            return Err(Error::argument("ordinal", found, "8.0 or later"));
        }
        let kernels_for = kernels_for.unwrap_or((major, minor));
        let clusters = kernels_for.0 >= 9;
        let hopper = if kernels_for == (9, 0) {
            Some(HopperModules {
                attention: compiled!(context, "attention.90a.cubin"),
                products: product_modules!(
                    context,
                    "elements",
                    "floats",
                    "added",
                    "gated",
                    "greatest",
                    "summarized"
                ),
            })
        } else {
            None
        };
        let stream = context.new_stream()?;
        let modules = Modules {
            attention: module!(context, clusters, "attention"),
            commit: module!(context, clusters, "commit"),
            couple: module!(context, clusters, "couple"),
            draw: module!(context, clusters, "draw"),
            norm: module!(context, clusters, "norm"),
            random: module!(context, clusters, "random"),
            rope: module!(context, clusters, "rope"),
            select: module!(context, clusters, "select"),
            hopper,
        };
        let products = Products::new()?;
        // SAFETY: plain allocation; freed in `drop`.
        let workspace = unsafe { result::malloc_sync(WORKSPACE)? };
        Ok(Self(Rc::new(Inner { products, modules, stream, context, workspace, clusters })))
    }

    /// Its name.
    ///
    /// # Errors
    /// The driver fails.
    pub fn name(&self) -> Result<String> {
        Ok(self.0.context.name()?)
    }

    /// Free and total memory, in bytes.
    ///
    /// # Errors
    /// The driver fails.
    pub fn memory(&self) -> Result<(usize, usize)> {
        Ok(self.0.context.mem_get_info()?)
    }

    /// Its compute capability.
    #[cfg(test)]
    pub(super) fn compute_capability(&self) -> Result<(i32, i32)> {
        Ok(self.0.context.compute_capability()?)
    }

    /// Number of multiprocessors.
    pub(super) fn multiprocessors(&self) -> Result<usize> {
        let count = sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        Ok(self.0.context.attribute(count)? as usize)
    }

    /// Makes this GPU the thread's.
    pub(super) fn bind(&self) -> Result<()> {
        Ok(self.0.context.bind_to_thread()?)
    }

    pub(super) fn products(&self) -> &Products {
        &self.0.products
    }

    /// The memory that products may use, and the stream.
    pub(super) fn workspace(&self) -> (CUdeviceptr, sys::CUstream) {
        (self.0.workspace, self.0.stream.cu_stream())
    }

    pub(super) fn modules(&self) -> &Modules {
        &self.0.modules
    }

    /// Waits until everything asked for is done.
    pub(super) fn synchronize(&self) -> Result<()> {
        Ok(self.0.stream.synchronize()?)
    }

    /// Waits until the first `count` of `words` are there: they were zero before work was asked for that writes
    /// something else to each. That is sooner than all of it counts as done, by what it takes to say so.
    pub(super) fn wait_for(&self, words: &Pinned<u64>, count: usize) -> Result<()> {
        assert!(count <= words.len, "the words have a place");
        let mut there = 0;
        let mut look = || {
            // SAFETY: within the words, which nobody has borrowed; the GPU writes each at once.
            while there < count && unsafe { words.pointer.add(there).read_volatile() } != 0 {
                there += 1;
            }
            there == count
        };
        loop {
            for _ in 0..LOOKS {
                if look() {
                    fence(Ordering::Acquire);
                    return Ok(());
                }
                spin_loop();
            }
            // Nothing comes of work that failed.
            // SAFETY: the stream is alive.
            let state = unsafe { sys::cuStreamQuery(self.0.stream.cu_stream()) };
            if state != sys::CUresult::CUDA_ERROR_NOT_READY {
                state.result()?;
                assert!(look(), "what was asked for writes every word");
            }
        }
    }

    /// Memory of `bytes` bytes, zeroed.
    pub(super) fn allocate(&self, bytes: usize) -> Result<Buffer> {
        self.0.context.bind_to_thread()?;
        // The driver refuses empty allocations.
        let bytes = bytes.max(1);
        // SAFETY: the memory is freed once, in `drop`, and zeroed before anything in the stream uses it.
        let pointer = unsafe {
            let pointer = result::malloc_sync(bytes)?;
            result::memset_d8_async(pointer, 0, bytes, self.0.stream.cu_stream())?;
            pointer
        };
        Ok(Buffer { pointer, bytes, gpu: self.clone() })
    }

    /// A copy of `data` on the GPU.
    pub(super) fn upload<T: bytes::Plain>(&self, data: &[T]) -> Result<Buffer> {
        let buffer = self.allocate(size_of_val(data))?;
        // In the stream: other copies return once the data has been read, and what the stream does next may come before it
        // has landed.
        // SAFETY: the buffer is as large as the data, which is there until the stream has been waited for.
        unsafe { result::memcpy_htod_async(buffer.pointer, data, self.0.stream.cu_stream())? };
        self.synchronize()?;
        Ok(buffer)
    }

    /// Copies elements to the host that begin `skipped` bytes on in a buffer, after all work asked for before.
    pub(super) fn download<T: bytes::Plain>(
        &self,
        from: &Buffer,
        skipped: usize,
        to: &mut [T],
    ) -> Result<()> {
        assert!(skipped + size_of_val(to) <= from.bytes, "the buffer has what is read");
        self.synchronize()?;
        // SAFETY: checked above; any bytes are a valid `Plain`.
        unsafe { result::memcpy_dtoh_sync(to, from.at(skipped))? };
        Ok(())
    }

    /// Host memory that copies in the stream can use without waiting, zeroed.
    pub(super) fn pinned<T: bytes::Plain>(&self, len: usize) -> Result<Pinned<T>> {
        self.0.context.bind_to_thread()?;
        let bytes = len * size_of::<T>();
        // SAFETY: the memory is freed once, in `drop`; zeroes are a valid `Plain`.
        let pointer = unsafe {
            let pointer = result::malloc_host(bytes.max(1), 0)?.cast::<T>();
            pointer.write_bytes(0, len);
            pointer
        };
        Ok(Pinned { pointer, len, _element: PhantomData, _gpu: self.clone() })
    }

    /// Asks for a copy of the first `bytes` of `from`, whose memory has to stay as it is until the stream has got
    /// there.
    pub(super) fn copy_in<T: bytes::Plain>(
        &self,
        from: &Pinned<T>,
        to: &Buffer,
        bytes: usize,
    ) -> Result<()> {
        assert!(
            bytes <= to.bytes && bytes <= from.len * size_of::<T>(),
            "the copy fits both sides"
        );
        self.0.context.bind_to_thread()?;
        // SAFETY: checked above; pinned memory is freed only after the stream has been waited for.
        unsafe {
            let from = std::slice::from_raw_parts(from.pointer.cast::<u8>(), bytes);
            result::memcpy_htod_async(to.pointer, from, self.0.stream.cu_stream())?;
        }
        Ok(())
    }

    /// Asks for a copy within the GPU, to `at` bytes on in a buffer.
    pub(super) fn copy(
        &self,
        from: CUdeviceptr,
        to: &Buffer,
        at: usize,
        bytes: usize,
    ) -> Result<()> {
        assert!(at + bytes <= to.bytes, "the copy fits its target");
        self.0.context.bind_to_thread()?;
        // SAFETY: the caller names live memory.
        unsafe {
            result::memcpy_dtod_async(to.at(at), from, bytes, self.0.stream.cu_stream())?;
        }
        Ok(())
    }

    /// Asks for a kernel.
    ///
    /// # Safety
    /// `parameters` point to values of the types that the kernel declares, and what it accesses is live memory of
    /// sufficient size until the stream has got there.
    pub(super) unsafe fn launch(
        &self,
        function: &CudaFunction,
        grid: (u32, u32, u32),
        block: (u32, u32),
        parameters: &mut [*mut c_void],
    ) -> Result<()> {
        let (stream, block) = (self.0.stream.cu_stream(), (block.0, block.1, 1));
        self.0.context.bind_to_thread()?;
        // SAFETY: promised by the caller.
        unsafe {
            result::launch_kernel(function.cu_function(), grid, block, 0, stream, parameters)?;
        }
        Ok(())
    }

    /// Asks for a kernel that may be started while the kernel asked for before it still runs, where the GPU can do
    /// that: it waits by itself (`inputs_ready` in `kernels/common.cuh`) before it touches memory that others write.
    ///
    /// # Safety
    /// As [`launch`](Self::launch), and the kernel does that.
    pub(super) unsafe fn launch_early(
        &self,
        function: &CudaFunction,
        grid: (u32, u32, u32),
        block: (u32, u32),
        parameters: &mut [*mut c_void],
    ) -> Result<()> {
        // SAFETY: promised by the caller.
        unsafe { self.launch_clusters(function, grid, block, Clusters::default(), parameters) }
    }

    /// As [`launch_early`](Self::launch_early), with blocks that work together.
    ///
    /// # Safety
    /// As there.
    pub(super) unsafe fn launch_clusters(
        &self,
        function: &CudaFunction,
        grid: (u32, u32, u32),
        block: (u32, u32),
        clusters: Clusters,
        parameters: &mut [*mut c_void],
    ) -> Result<()> {
        self.0.context.bind_to_thread()?;
        let attributes = &mut attributes(clusters.blocks);
        let mut config = launch_config(grid, block, clusters.shared_bytes, attributes);
        config.hStream = self.0.stream.cu_stream();
        let blocks = grid.0 * grid.1 * grid.2;
        if !self.0.clusters || (clusters.blocks == (1, 1) && blocks > EARLY_BLOCKS) {
            config.numAttrs = 0;
        }
        // SAFETY: promised by the caller.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                function.cu_function(),
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
            .result()?;
        }
        Ok(())
    }

    /// How many clusters of such blocks can run at once, where there are clusters.
    pub(super) fn clusters_at_once(
        &self,
        function: &CudaFunction,
        threads: u32,
        clusters: Clusters,
    ) -> Result<usize> {
        self.0.context.bind_to_thread()?;
        let attributes = &mut attributes(clusters.blocks);
        let (x, y) = clusters.blocks;
        let config = launch_config((x, y, 1), (threads, 1), clusters.shared_bytes, attributes);
        let mut count = 0;
        // SAFETY: the configuration is of the function's.
        unsafe {
            sys::cuOccupancyMaxActiveClusters(
                &raw mut count,
                function.cu_function(),
                &raw const config,
            )
            .result()?;
        }
        Ok(count as usize)
    }

    /// Bytes of shared memory that a block can have, and that each of two blocks of a multiprocessor can have.
    pub(super) fn shared_memory(&self) -> Result<(usize, usize)> {
        use sys::CUdevice_attribute_enum as Attribute;
        let block = Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let all = Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR;
        let context = &self.0.context;
        // The driver keeps so much of it for each block.
        let kept = 1024;
        Ok((context.attribute(block)? as usize, context.attribute(all)? as usize / 2 - kept))
    }

    /// Whether there are clusters, and kernels can be started early.
    pub(super) fn has_clusters(&self) -> bool {
        self.0.clusters
    }

    /// Does what `work` asks for, once: kernels are loaded and libraries set themselves up on first use, which cannot
    /// be captured. Then captures it as a graph.
    pub(super) fn capture(&self, work: impl Fn() -> Result<()>) -> Result<Graph> {
        work()?;
        self.synchronize()?;
        let stream = &self.0.stream;
        stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED)?;
        let outcome = work();
        // Ends the capture whatever came of it: a stream that captures can do nothing else.
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        outcome?;
        let graph = graph?.expect("a stream that captures has a graph");
        graph.upload()?;
        Ok(Graph(graph))
    }

    /// Milliseconds that the GPU takes for what `work` asks for.
    pub(super) fn time(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let start = self.0.stream.record_event(flags)?;
        work()?;
        let end = self.0.stream.record_event(flags)?;
        end.synchronize()?;
        Ok(f64::from(start.elapsed_ms(&end)?))
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu").field("ordinal", &self.0.context.ordinal()).finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: made in `new`, and nothing is left that could use them. There is no one to tell of an error.
        unsafe {
            let _ = self.context.bind_to_thread();
            let _ = self.stream.synchronize();
            let _ = result::free_sync(self.workspace);
        }
    }
}

/// Lets blocks of a kernel have this much shared memory beyond what it declares.
pub(super) fn allow_shared_memory(function: &CudaFunction, bytes: usize) -> Result<()> {
    use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    function.set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes as i32)?;
    Ok(())
}

/// A captured sequence of work.
pub(super) struct Graph(CudaGraph);

impl Graph {
    pub(super) fn launch(&self) -> Result<()> {
        Ok(self.0.launch()?)
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Graph")
    }
}

/// Blocks that run at the same time and can read each other's shared memory, where the GPU can do that.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clusters {
    /// Along both dimensions of the grid.
    pub(super) blocks: (u32, u32),
    /// Shared memory of a block beyond what its kernel declares.
    pub(super) shared_bytes: usize,
}

impl Default for Clusters {
    fn default() -> Self {
        Self { blocks: (1, 1), shared_bytes: 0 }
    }
}

/// Attributes of a kernel that is started early, in clusters of `blocks`.
fn attributes(blocks: (u32, u32)) -> [sys::CUlaunchAttribute; 2] {
    use sys::CUlaunchAttributeID as Id;
    // SAFETY: an attribute of zeroes is a value of its type, of plain integers.
    let mut attributes: [sys::CUlaunchAttribute; 2] = unsafe { std::mem::zeroed() };
    attributes[0].id = Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[0].value.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[1].value.clusterDim.x = blocks.0;
    attributes[1].value.clusterDim.y = blocks.1;
    attributes[1].value.clusterDim.z = 1;
    attributes
}

fn launch_config(
    grid: (u32, u32, u32),
    block: (u32, u32),
    shared_bytes: usize,
    attributes: &mut [sys::CUlaunchAttribute],
) -> sys::CUlaunchConfig {
    sys::CUlaunchConfig {
        gridDimX: grid.0,
        gridDimY: grid.1,
        gridDimZ: grid.2,
        blockDimX: block.0,
        blockDimY: block.1,
        blockDimZ: 1,
        sharedMemBytes: shared_bytes as u32,
        hStream: std::ptr::null_mut(),
        attrs: attributes.as_mut_ptr(),
        numAttrs: attributes.len() as u32,
    }
}

/// Memory on the GPU.
pub(super) struct Buffer {
    pointer: CUdeviceptr,
    bytes: usize,
    gpu: Gpu,
}

impl Buffer {
    pub(super) fn pointer(&self) -> CUdeviceptr {
        self.pointer
    }

    /// The address `bytes` bytes on.
    pub(super) fn at(&self, bytes: usize) -> CUdeviceptr {
        assert!(bytes <= self.bytes, "the address is within the buffer");
        self.pointer + bytes as u64
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: made by `allocate`; the stream may still use it, so it is waited for.
        unsafe {
            let _ = self.gpu.0.context.bind_to_thread();
            let _ = self.gpu.0.stream.synchronize();
            let _ = result::free_sync(self.pointer);
        }
    }
}

/// Host memory for copies in the stream.
pub(super) struct Pinned<T> {
    pointer: *mut T,
    len: usize,
    _element: PhantomData<T>,
    _gpu: Gpu,
}

impl<T: bytes::Plain> Pinned<T> {
    /// The elements. What the GPU writes here is there after the next wait.
    pub(super) fn as_slice(&self) -> &[T] {
        // SAFETY: `pointer` holds `len` elements, zeroed when they were made.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Where the GPU writes the elements itself: they are there after the next wait.
    pub(super) fn device(&self) -> CUdeviceptr {
        // Memory of `cuMemHostAlloc` has the same address on both sides.
        self.pointer as CUdeviceptr
    }

    /// The elements. The caller has waited for what the GPU reads or writes of them.
    pub(super) fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.len) }
    }
}

impl<T> fmt::Debug for Pinned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned").field("len", &self.len).finish_non_exhaustive()
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        // SAFETY: made by `pinned`; the stream may still use it, so it is waited for.
        unsafe {
            let _ = self._gpu.0.context.bind_to_thread();
            let _ = self._gpu.0.stream.synchronize();
            let _ = result::free_host(self.pointer.cast());
        }
    }
}

pub(super) mod bytes {
    /// Types for which every pattern of bytes is a value, and which have no padding.
    pub(in crate::candle::cuda) trait Plain: Copy {}
    impl Plain for u8 {}
    impl Plain for u32 {}
    impl Plain for u64 {}
    impl Plain for f32 {}
    impl Plain for half::bf16 {}
    impl Plain for half::f16 {}
}
