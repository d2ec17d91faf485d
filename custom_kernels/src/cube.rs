//! What the CubeCL kernels share: how a float32 result is rounded and stored, sums over the units of a row, launch sizes.
//!
//! Kernels compute in float32 whatever the operands are stored in. A result observable in 16 bits is stored in 16 bits where
//! the runtime does so ([`KernelRuntime::NARROW`]), else as float32 values that are exactly those.

use burn::tensor::{DType, Shape, Tensor, TensorPrimitive, backend::Backend};
use burn_cubecl::{
    CubeBackend, CubeRuntime, element::BoolElement, kernel::into_contiguous,
    ops::numeric::empty_device_contiguous_dtype,
};
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::ops::gated_delta_rule::DeltaHeads;
use crate::ops::sparse_attention::BlockSelection;
use crate::precise::Precise;
use crate::precision::Precision;

pub(crate) use burn_cubecl::tensor::CubeTensor;

/// Units of a cube in the elementwise and row kernels: enough to fill a multiprocessor at eight cubes, and within every
/// runtime's limit.
pub(crate) const UNITS: u32 = 256;

/// A CubeCL runtime and the operations it does better than the portable kernels.
///
/// `None` means "not here": the caller runs the portable kernel. Operands are contiguous unless a method says otherwise.
pub trait KernelRuntime: CubeRuntime {
    /// Whether results observable in bfloat16 or half precision are stored in it.
    const NARROW: bool;

    /// The operations in f64 where the device has them.
    fn precise<BT: BoolElement>(
        _device: &Self::Device,
    ) -> Option<&'static dyn Precise<CubeBackend<Self, f32, i32, BT>>> {
        None
    }

    /// A buffer of `size` bytes with `pieces` in their places; what lies between them has no meaning.
    fn upload(
        client: &ComputeClient<Self>,
        size: usize,
        pieces: &mut dyn Iterator<Item = (usize, &[u8])>,
        _device: &Self::Device,
    ) -> Handle {
        let mut whole = vec![0; size];
        for (at, bytes) in pieces {
            whole[at..][..bytes.len()].copy_from_slice(bytes);
        }
        client.create_from_slice(&whole)
    }

    /// `addend + factor x w^T` or `factor x w^T`: `x` `[rows, in]`, `weight` `[out, in]`, into `out` type `dtype`.
    fn linear(
        _x: &CubeTensor<Self>,
        _weight: &CubeTensor<Self>,
        _addend: Option<&CubeTensor<Self>>,
        _factor: f32,
        _dtype: DType,
    ) -> Option<CubeTensor<Self>> {
        None
    }

    /// Whether [`Self::linear_e4m3`] multiplies on this device.
    fn multiplies_e4m3(_device: &Self::Device) -> bool {
        false
    }

    /// `addend + x w^T` of E4M3 codes with a float32 scale per row of either operand, each `(codes, scales)`; `shape` is
    /// the weight's `[out, in]`, the result bfloat16.
    fn linear_e4m3(
        _x: (&CubeTensor<Self>, &CubeTensor<Self>),
        _weight: (&CubeTensor<Self>, &CubeTensor<Self>),
        _shape: [usize; 2],
        _addend: Option<&CubeTensor<Self>>,
    ) -> Option<CubeTensor<Self>> {
        None
    }

    /// As [`crate::EvaluatorBackend::mixture_of_experts`], result observable in bfloat16: `y`, the experts `[rows, top_k]`
    /// and their weights.
    fn mixture_of_experts(_operands: &MixtureOperands<'_, Self>) -> Option<[CubeTensor<Self>; 3]> {
        None
    }

    /// The experts `[rows, top_k]` that float32 `logits` `[rows, experts]` choose, and their weights, as in
    /// [`crate::ops::route_experts`].
    fn choose_experts(_logits: &CubeTensor<Self>, _top_k: usize) -> Option<[CubeTensor<Self>; 2]> {
        None
    }

    /// As [`crate::EvaluatorBackend::multiplies_packed_experts`].
    fn multiplies_packed_experts(_device: &Self::Device) -> bool {
        false
    }

    /// As [`crate::EvaluatorBackend::packed_experts`].
    fn packed_experts(_job: &PackedJob<'_, Self>, _outputs: Option<CubeTensor<Self>>) -> Option<CubeTensor<Self>> {
        None
    }

    /// As [`crate::EvaluatorBackend::combine_experts`], operands and result bfloat16, `weights` and `scores` float32.
    fn combine_experts(_operands: [&CubeTensor<Self>; 4]) -> Option<CubeTensor<Self>> {
        None
    }

    /// As [`crate::EvaluatorBackend::causal_attention`], result observable in bfloat16.
    fn causal_attention(
        _q: &CubeTensor<Self>,
        _keys: &CubeTensor<Self>,
        _values: &CubeTensor<Self>,
        _first_position: usize,
    ) -> Option<CubeTensor<Self>> {
        None
    }

    /// As [`crate::EvaluatorBackend::sparse_attention`], result observable in bfloat16.
    fn sparse_attention(
        _q: &CubeTensor<Self>,
        _keys: &CubeTensor<Self>,
        _values: &CubeTensor<Self>,
        _selection: &BlockSelection,
    ) -> Option<CubeTensor<Self>> {
        None
    }

    /// As [`crate::EvaluatorBackend::choose_blocks`]; `q` and `keys` float32.
    fn choose_blocks(
        _q: &CubeTensor<Self>,
        _keys: &CubeTensor<Self>,
        _first_position: usize,
        _ratio: usize,
        _count: usize,
    ) -> Option<BlockSelection> {
        None
    }

    /// As [`crate::EvaluatorBackend::gated_delta_rule`], result observable in bfloat16; `g`, `beta`, `state` float32.
    fn gated_delta_rule(
        _qkv: &CubeTensor<Self>,
        _g: &CubeTensor<Self>,
        _beta: &CubeTensor<Self>,
        _state: &CubeTensor<Self>,
        _heads: DeltaHeads,
    ) -> Option<(CubeTensor<Self>, CubeTensor<Self>)> {
        None
    }
}

/// [`crate::ops::packed_experts::PackedExperts`] on a runtime: `x` `[rows, hidden]` and words of records.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "one runtime reads them"))]
pub struct PackedJob<'a, R: CubeRuntime> {
    pub(crate) x: &'a CubeTensor<R>,
    pub(crate) records: &'a CubeTensor<R>,
    pub(crate) stride: usize,
    pub(crate) inner: usize,
    pub(crate) factors: &'a [[f32; 3]],
    pub(crate) scales: Option<&'a [[f32; 3]]>,
    pub(crate) counts: &'a [usize],
    pub(crate) choices: &'a [u32],
    pub(crate) top_k: usize,
}

/// What a mixture of experts reads: `residual` and `x` `[batch, tokens, in]`, the rest as in
/// [`crate::ops::mixture_of_experts::Mixture`], the matrices of the routed experts on top of one another.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "one runtime reads them"))]
pub struct MixtureOperands<'a, R: CubeRuntime> {
    pub(crate) residual: &'a CubeTensor<R>,
    pub(crate) x: &'a CubeTensor<R>,
    /// `[experts, in]`.
    pub(crate) router: &'a CubeTensor<R>,
    pub(crate) top_k: usize,
    /// `[experts * 2 * inner, in]`.
    pub(crate) gate_up: &'a CubeTensor<R>,
    /// `[experts * in, inner]`.
    pub(crate) down: &'a CubeTensor<R>,
    pub(crate) shared_gate: &'a CubeTensor<R>,
    pub(crate) shared_up: &'a CubeTensor<R>,
    pub(crate) shared_down: &'a CubeTensor<R>,
    pub(crate) shared_score: &'a CubeTensor<R>,
}

/// The type a result observable in `to` is stored in.
pub(crate) fn storage<R: KernelRuntime>(to: Precision) -> DType {
    match to {
        Precision::Bf16 if R::NARROW => DType::BF16,
        Precision::F16 if R::NARROW => DType::F16,
        _ => DType::F32,
    }
}

/// An uninitialised contiguous tensor beside `like`.
pub(crate) fn empty<R: CubeRuntime>(like: &CubeTensor<R>, shape: impl Into<Shape>, dtype: DType) -> CubeTensor<R> {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}

/// The same values without gaps between rows.
pub(crate) fn contiguous<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    into_contiguous(x)
}

/// A burn tensor's primitive, contiguous.
pub(crate) fn primitive<R, B, const D: usize>(x: Tensor<B, D>) -> CubeTensor<R>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>>,
{
    contiguous(x.into_primitive().tensor())
}

/// The burn tensor of a primitive.
pub(crate) fn tensor<R, B, const D: usize>(x: CubeTensor<R>) -> Tensor<B, D>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>>,
{
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

/// The widest vector that divides `width` elements of every type in `dtypes` and is at most 16 bytes of the narrowest.
pub(crate) fn vector_size<R: CubeRuntime>(x: &CubeTensor<R>, width: usize, dtypes: &[DType]) -> usize {
    let narrowest = dtypes.iter().map(|t| t.size()).min().unwrap_or(4);
    let most = (16 / narrowest).min(x.client.properties().hardware.max_vector_size);
    [8, 4, 2, 1]
        .into_iter()
        .find(|n| *n <= most && width % n == 0)
        .unwrap_or(1)
}

/// `count` cubes, spread over two axes where one is too short; kernels read the running `CUBE_POS`.
pub(crate) fn cubes<R: CubeRuntime>(client: &ComputeClient<R>, count: usize) -> CubeCount {
    let (most, ..) = client.properties().hardware.max_cube_count;
    let x = count.clamp(1, most.min(1 << 16) as usize);
    CubeCount::Static(x as u32, count.max(1).div_ceil(x) as u32, 1)
}

/// Whether row sums may use the shuffles of 32-unit planes.
pub(crate) fn planes<R: CubeRuntime>(client: &ComputeClient<R>) -> bool {
    let hardware = &client.properties().hardware;
    hardware.plane_size_min == 32 && hardware.plane_size_max == 32
}

/// What a kernel has left to round when its result is stored as `dtype`: storing in 16 bits rounds by itself.
pub(crate) fn left_to_round(to: Precision, dtype: DType) -> Precision {
    if dtype == DType::F32 { to } else { Precision::Full }
}

/// The address type that reaches every element of `tensors`.
pub(crate) fn address_type<R: CubeRuntime>(tensors: &[&CubeTensor<R>]) -> AddressType {
    tensors
        .iter()
        .map(|t| t.required_address_type())
        .max()
        .unwrap_or_default()
}

/// `x` rounded to the nearest value of `to`, ties to even, still as float32.
#[cube]
pub(crate) fn rounded<N: Size>(x: Vector<f32, N>, #[comptime] to: Precision) -> Vector<f32, N> {
    match comptime!(to) {
        Precision::Full => x,
        Precision::Bf16 => {
            let bits = Vector::<u32, N>::reinterpret(x);
            let odd = (bits >> Vector::new(16u32)) & Vector::new(1u32);
            let up = (bits + Vector::new(0x7fffu32) + odd) & Vector::new(0xffff_0000u32);
            select_many(x.is_nan(), x, Vector::<f32, N>::reinterpret(up))
        }
        Precision::F16 => {
            // Normal halves drop 13 bits; below 2^-14 values are multiples of 2^-24, counted in integers so that no
            // compiler can simplify the rounding away.
            let bits = Vector::<u32, N>::reinterpret(x);
            let sign = bits & Vector::new(0x8000_0000u32);
            let size = bits & Vector::new(0x7fff_ffffu32);
            let odd = (size >> Vector::new(13u32)) & Vector::new(1u32);
            let up = (size + Vector::new(0xfffu32) + odd) & Vector::new(0xffff_e000u32);
            let steps = Vector::<f32, N>::reinterpret(size) * Vector::new(16_777_216.0f32);
            let steps = select_many(size.less_than(Vector::new(0x3880_0000u32)), steps, Vector::new(0.0f32));
            let whole = Vector::<u32, N>::cast_from(steps);
            let rest = steps - Vector::<f32, N>::cast_from(whole);
            let half = Vector::<f32, N>::new(0.5f32);
            let one = Vector::<u32, N>::new(1u32);
            let tie = select_many(rest.equal(half), whole & one, Vector::new(0u32));
            let whole = whole + select_many(rest.greater_than(half), one, tie);
            let tiny = Vector::<f32, N>::cast_from(whole) / Vector::new(16_777_216.0f32);
            let tiny = Vector::<u32, N>::reinterpret(tiny);
            let value = select_many(size.less_than(Vector::new(0x3880_0000u32)), tiny, up);
            let infinite = value.greater_equal(Vector::new(0x4780_0000u32));
            let value = select_many(infinite, Vector::new(0x7f80_0000u32), value);
            select_many(x.is_nan(), x, Vector::<f32, N>::reinterpret(value | sign))
        }
    }
}

/// `1 / (1 + exp(-x))`.
#[cube]
pub(crate) fn sigmoid<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let one = Vector::new(1.0f32);
    one / (one + (Vector::new(0.0f32) - x).exp())
}

/// Sum of `value` over the `lanes` consecutive units of a row, a power of two; every unit of the row gets it. All `units`
/// of the cube take part.
#[cube]
pub(crate) fn row_sum(value: f32, #[comptime] lanes: u32, #[comptime] units: u32, #[comptime] planes: bool) -> f32 {
    let mut sum = value;
    if comptime!(planes) {
        #[unroll]
        for i in 0..comptime!(lanes.min(32).ilog2()) {
            sum += plane_shuffle_xor(sum, comptime!(1u32 << i));
        }
        if comptime!(lanes > 32) {
            let mut shared = SharedMemory::<f32>::new(comptime!((units / 32) as usize));
            sync_cube();
            if UNIT_POS % 32 == 0 {
                shared[(UNIT_POS / 32) as usize] = sum;
            }
            sync_cube();
            let first = (UNIT_POS / lanes) * comptime!(lanes / 32);
            sum = 0.0f32;
            #[unroll]
            for i in 0..comptime!(lanes / 32) {
                sum += shared[(first + i) as usize];
            }
        }
    } else {
        let mut shared = SharedMemory::<f32>::new(comptime!(units as usize));
        #[unroll]
        for i in 0..comptime!(lanes.ilog2()) {
            sync_cube();
            shared[UNIT_POS as usize] = sum;
            sync_cube();
            sum += shared[(UNIT_POS ^ comptime!(1u32 << i)) as usize];
        }
        sync_cube();
    }
    sum
}

/// Whether the Vulkan loader finds a device.
#[cfg(feature = "vulkan")]
pub fn has_vulkan_device() -> bool {
    use cubecl::wgpu::{GraphicsApi, Vulkan, WgpuRuntime};
    !WgpuRuntime::enumerate_all_devices(&Vulkan::backend()).is_empty()
}

#[cfg(feature = "vulkan")]
impl KernelRuntime for cubecl::wgpu::WgpuRuntime {
    const NARROW: bool = false;
}
