//! Matrix products by a kernel of our own, for GPUs of compute capability 9.0 (`kernels/hopper/product.cuh`): it keeps up
//! with the memory at more rows than cuBLASLt does, and asks for the weight before the kernels ahead of it are done.

use std::ops::RangeInclusive;

use candle_core::DType;
use cudarc::driver::CudaFunction;
use cudarc::driver::sys::{self, CUdeviceptr};

use super::device::{Clusters, Gpu, allow_shared_memory};
use super::kernels::parameters;
use super::products::{Operands, Product};
use crate::candle::Result;

/// Rows of `x` that there are kernels for, and with how many warpgroups.
const KERNELS: [(usize, RangeInclusive<usize>); 9] = [
    (8, 1..=3),
    (16, 1..=3),
    (24, 1..=3),
    (40, 1..=3),
    (64, 1..=3),
    (72, 1..=3),
    (128, 2..=3),
    (136, 2..=3),
    (256, 2..=2),
];

/// Columns of a tile, and bytes of one of its rows.
pub(super) const COLUMNS: usize = 64;
const ROW_BYTES: usize = 2 * COLUMNS;

/// Up to so many rows, threads send sums to other splits.
const SENT_ROWS: usize = 24;

/// Bytes of shared memory that the kernel declares, and that aligning its tiles may take.
const STATIC_BYTES: usize = 1024;
const ALIGNMENT: usize = 1024;

const MAX_STAGES: usize = 16;
const MIN_STAGES: usize = 3;
const MAX_SPLITS: usize = 6;

/// How the kernel does the products of one shape.
#[derive(Debug)]
pub(super) struct Tiles {
    function: CudaFunction,
    /// Rows of a tile of `x`, of which there may be several.
    rows: usize,
    /// Groups of four warps in a block, for 64 outputs each.
    warpgroups: usize,
    /// Parts of the inputs.
    splits: usize,
    stages: usize,
    shared_bytes: usize,
}

impl Tiles {
    /// Ways to do the products of a shape; none where the kernel does not do them.
    pub(super) fn ways(gpu: &Gpu, shape: &Product) -> Result<Vec<Self>> {
        let mut ways = Vec::new();
        let Some(modules) = &gpu.modules().hopper else { return Ok(ways) };
        let products = &modules.products[shape.output as usize];
        let module = match shape.dtype {
            DType::BF16 => &products[0],
            DType::F16 => &products[1],
            _ => return Ok(ways),
        };
        let suits = shape.inputs.is_multiple_of(8) && shape.outputs.is_multiple_of(16);
        let widest = KERNELS.iter().position(|(rows, _)| suits && *rows >= shape.rows);
        let Some(widest) = widest else { return Ok(ways) };
        let memory = gpu.shared_memory()?.0 - STATIC_BYTES;
        let columns = shape.inputs.div_ceil(COLUMNS);
        let kernels = KERNELS[..=widest].iter().flat_map(|(rows, warpgroups)| {
            warpgroups.clone().map(|warpgroups| (*rows, warpgroups))
        });
        for (rows, warpgroups) in kernels {
            let function = module.load_function(&format!("product_{rows}_{warpgroups}"))?;
            allow_shared_memory(&function, memory)?;
            let row_tiles = shape.rows.div_ceil(rows);
            let tiles = shape.outputs.div_ceil(64 * warpgroups) * row_tiles;
            let most = if shape.output.is_of_whole() { 1 } else { MAX_SPLITS };
            for splits in 1..=most.min(columns) {
                let depth = columns.div_ceil(splits);
                let Some((stages, shared_bytes)) = stages(rows, warpgroups, splits, depth, memory)
                else {
                    continue;
                };
                let clusters = clusters(splits, shared_bytes);
                if (splits == 1 && row_tiles == 1)
                    || tiles <= gpu.clusters_at_once(&function, threads(warpgroups), clusters)?
                {
                    let function = function.clone();
                    ways.push(Self { function, rows, warpgroups, splits, stages, shared_bytes });
                }
            }
        }
        Ok(ways)
    }

    /// Outputs of a block.
    fn outputs(&self) -> usize {
        64 * self.warpgroups
    }

    /// Blocks that share `outputs` outputs.
    pub(super) fn parts(&self, outputs: usize) -> usize {
        outputs.div_ceil(self.outputs())
    }

    pub(super) fn run(&self, gpu: &Gpu, shape: &Product, operands: Operands) -> Result<()> {
        let tile_outputs = self.outputs();
        let w = matrix(operands.w, shape.dtype, [shape.outputs, shape.inputs], tile_outputs)?;
        let x = matrix(operands.x, shape.dtype, [shape.rows, shape.inputs], self.rows)?;
        let Operands { y, summaries, .. } = operands;
        let sizes = [shape.rows, shape.inputs, shape.outputs, self.stages];
        let [rows, inputs, outputs, stages] = sizes.map(|size| size as i32);
        // SAFETY: the types are the kernel's; whoever has the operands checked them against the shape.
        unsafe {
            gpu.launch_clusters(
                &self.function,
                (
                    self.parts(shape.outputs) as u32,
                    self.splits as u32,
                    shape.rows.div_ceil(self.rows) as u32,
                ),
                (threads(self.warpgroups), 1),
                clusters(self.splits, self.shared_bytes),
                parameters!(w, x, y, summaries, rows, inputs, outputs, stages),
            )
        }
    }
}

/// For messages of tests: rows, warpgroups and splits.
#[cfg(test)]
impl std::fmt::Display for Tiles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}x{}x{}", self.rows, self.warpgroups, self.splits)
    }
}

/// Four warps for each warpgroup, and one that asks for tiles.
fn threads(warpgroups: usize) -> u32 {
    128 * warpgroups as u32 + 32
}

fn clusters(splits: usize, shared_bytes: usize) -> Clusters {
    Clusters { blocks: (1, splits as u32), shared_bytes }
}

/// How many stages there is room for, if a block has so many tiles, and the memory that a block then needs.
fn stages(
    rows: usize,
    warpgroups: usize,
    splits: usize,
    tiles: usize,
    memory: usize,
) -> Option<(usize, usize)> {
    let outputs = 64 * warpgroups;
    // What takes the place of tiles, and what is received from other splits.
    let (results, received) = match (splits, rows <= SENT_ROWS) {
        (1, _) => (2 * rows * (outputs + 8), 0),
        (_, true) => (0, splits * (rows / 2).div_ceil(splits) * outputs * 8),
        (_, false) => {
            let row = 4 * (outputs + 4);
            (rows * row, (splits - 1) * rows.div_ceil(splits) * row)
        }
    };
    let memory = (memory - ALIGNMENT).checked_sub(received)?;
    let stage = (outputs + rows) * ROW_BYTES;
    let stages = (memory / stage).min(MAX_STAGES).min(tiles);
    (stages >= MIN_STAGES.min(tiles) && results <= memory)
        .then_some((stages, ALIGNMENT + results.max(stages * stage) + received))
}

/// A matrix of which tiles of so many rows are copied.
fn matrix(
    address: CUdeviceptr,
    dtype: DType,
    [rows, columns]: [usize; 2],
    tile_rows: usize,
) -> Result<sys::CUtensorMap> {
    map(address, dtype, [columns, rows], &[columns], [COLUMNS, tile_rows])
}

/// An array of elements of 16 bits of which tiles are copied, in the pattern that tensor cores read: sizes from the
/// innermost out, and how many elements on the next entry of each but the innermost dimension is.
pub(super) fn map<const N: usize>(
    address: CUdeviceptr,
    dtype: DType,
    sizes: [usize; N],
    strides: &[usize],
    tile: [usize; N],
) -> Result<sys::CUtensorMap> {
    assert_eq!(strides.len() + 1, N, "the innermost dimension has no stride");
    let element = match dtype {
        DType::BF16 => sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        _ => sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    };
    let sizes = sizes.map(|size| size as u64);
    let strides: Vec<u64> = strides.iter().map(|&stride| 2 * stride as u64).collect();
    let (tile, steps) = (tile.map(|size| size as u32), [1; N]);
    // SAFETY: a map of zeroes is a value of its type, of plain integers, to be overwritten.
    let mut map: sys::CUtensorMap = unsafe { std::mem::zeroed() };
    // SAFETY: N dimensions, so that N sizes, tile sizes and steps are read, and a stride fewer.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            element,
            N as u32,
            address as *mut std::ffi::c_void,
            sizes.as_ptr(),
            strides.as_ptr(),
            tile.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        .result()?;
    }
    Ok(map)
}
