//! `out[m, n] = factor x[m, k] w[n, k]^T (+ addend)` through cuBLASLt, float32 accumulation, the sum rounded once; of f64
//! operands f64 throughout.
//!
//! cuBLASLt is column-major: row-major `out` is its `n x m` matrix `op_T(W) X` with `W` read as `k x n`, so weights stay
//! `[out, in]` as checkpoints store them.
//!
//! Products run on a stream of their own. Two events order it with CubeCL's work: everything queued in the context before
//! a product happens before it (`cuCtxRecordEvent`), everything queued later waits for it (`cuCtxWaitEvent`). Buffers may
//! therefore be dropped at once: whoever gets the memory next is queued behind the product.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use burn::tensor::DType;
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::device::Device;
use cubecl::device_handle::DeviceHandle;
use cubecl::prelude::*;
use cubecl::server::{Binding, ComputeServer};
use cubecl::stream_id::StreamId;
use cudarc::cublaslt::{result as lt, sys};
use cudarc::driver::{result as driver, sys as cuda};
use sys::cublasLtMatmulDescAttributes_t::{
    CUBLASLT_MATMUL_DESC_A_SCALE_POINTER as A_SCALE_POINTER, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER as B_SCALE_POINTER,
};

use sys::cublasLtMatrixLayoutAttribute_t::{
    CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT as BATCH_COUNT, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET as BATCH_DISTANCE,
};

use super::CudaTensor;
use crate::cube::empty;

type Server = <CudaRuntime as Runtime>::Server;

/// Room for split reductions; what cuBLAS itself recommends on Hopper is 32 MiB, twice that covers every shape seen.
const WORKSPACE_BYTES: usize = 64 << 20;

/// `CUBLAS_OP_T`, a transposed operand, in the library's C interface.
const OP_T: i32 = 1;
/// `CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F`: one float32 per row of an operand.
const SCALE_PER_ROW: i32 = 3;

/// Sets an attribute of a product to the bytes of `value`.
///
/// # Safety
/// `T` must be the attribute's documented type.
unsafe fn set<T>(
    product: sys::cublasLtMatmulDesc_t,
    attribute: sys::cublasLtMatmulDescAttributes_t,
    value: &T,
) -> Result<(), cudarc::cublaslt::result::CublasError> {
    // SAFETY: the address and size of a live value of the type the caller vouches for.
    unsafe { lt::set_matmul_desc_attribute(product, attribute, (&raw const *value).cast(), size_of::<T>()) }
}

/// Why cuBLASLt is not used.
#[derive(Debug, Clone, thiserror::Error)]
pub enum GemmError {
    /// The library is not on the loader's path.
    #[error("libcublasLt.so was not found: dense products fall back to CubeCL kernels, 2 to 4 times slower on Hopper")]
    LibraryMissing,
    /// A CUDA or cuBLASLt call failed.
    #[error("{call} failed for a product of {m} x {k} by {n}: {code}")]
    Call {
        /// The function.
        call: &'static str,
        /// Rows of `x`.
        m: usize,
        /// Reduced length.
        k: usize,
        /// Rows of the weight.
        n: usize,
        /// What it answered.
        code: String,
    },
}

/// Whether products on `device` go through cuBLASLt, and if not why.
pub fn availability(device: &CudaDevice) -> Result<(), GemmError> {
    engine(device).map(|_| ())
}

/// `x` `[..., k]`, `weight` `[n, k]`, `addend` `[..., n]` of type `dtype`, all contiguous; `None` when cuBLASLt cannot.
pub(super) fn linear(
    x: &CudaTensor,
    weight: &CudaTensor,
    addend: Option<&CudaTensor>,
    factor: f32,
    dtype: DType,
) -> Option<CudaTensor> {
    let engine = engine(&x.device).ok()?;
    let (n, k) = (weight.meta.shape()[0], weight.meta.shape()[1]);
    let m = x.meta.num_elements() / k;
    let types = (x.dtype, weight.dtype, dtype);
    let known = matches!(
        types,
        (DType::BF16, DType::BF16, DType::BF16 | DType::F32) | (DType::F32, DType::F32, DType::F32)
    );
    if !known || addend.is_some_and(|c| c.dtype != dtype) || m == 0 {
        return None;
    }
    let mut shape = x.meta.shape().clone();
    *shape.last_mut()? = n;
    let out = empty(x, shape, dtype);
    let key = Key {
        batch: 1,
        m,
        n,
        k,
        input: x.dtype,
        output: dtype,
    };
    let operands = Operands::new(x, weight, addend, &out, None);
    engine.submit(key, Operands { factor, ..operands }).ok()?;
    Some(out)
}

/// `x` `[batch, m, k]` times `weight` `[batch, n, k]`, all f64 and contiguous: `[batch, m, n]`; `None` when cuBLASLt cannot.
pub(super) fn product_f64(x: &CudaTensor, weight: &CudaTensor) -> Option<CudaTensor> {
    let engine = engine(&x.device).ok()?;
    let (of_x, of_weight) = (x.meta.shape(), weight.meta.shape());
    let key = Key {
        batch: of_x[0],
        m: of_x[1],
        n: of_weight[1],
        k: of_x[2],
        input: DType::F64,
        output: DType::F64,
    };
    if x.meta.num_elements() == 0 || weight.meta.num_elements() == 0 {
        return None;
    }
    let out = empty(x, [key.batch, key.m, key.n], DType::F64);
    engine.submit(key, Operands::new(x, weight, None, &out, None)).ok()?;
    Some(out)
}

/// `addend + x w^T` of E4M3 codes, each row of either operand times its float32 scale.
///
/// `x` `m` rows of codes, `weight` `shape` = `[n, k]`, scales `[m]` and `[n]`, `addend` `[m, n]` bfloat16; all contiguous.
/// `None` when this cuBLASLt or card has no such product.
pub(super) fn linear_e4m3(
    x: (&CudaTensor, &CudaTensor),
    weight: (&CudaTensor, &CudaTensor),
    shape: [usize; 2],
    addend: Option<&CudaTensor>,
) -> Option<CudaTensor> {
    let engine = engine(&x.0.device).ok()?;
    let ([n, k], m) = (shape, x.1.meta.num_elements());
    // 16-byte rows are what the 8-bit kernels ask for.
    if m == 0 || k % 16 != 0 || n % 16 != 0 || addend.is_some_and(|c| c.dtype != DType::BF16) {
        return None;
    }
    let out = empty(x.0, [m, n], DType::BF16);
    let key = Key {
        batch: 1,
        m,
        n,
        k,
        input: DType::U8,
        output: DType::BF16,
    };
    engine
        .submit(key, Operands::new(x.0, weight.0, addend, &out, Some((x.1, weight.1))))
        .ok()?;
    Some(out)
}

/// The buffers of one product, bound before it is queued so that their memory lives until it has been.
struct Operands {
    x: Binding,
    weight: Binding,
    addend: Option<Binding>,
    out: Binding,
    /// Row scales of `x` and of the weight.
    scales: Option<(Binding, Binding)>,
    /// What the product is multiplied by, in float32.
    factor: f32,
}

impl Operands {
    fn new(
        x: &CudaTensor,
        weight: &CudaTensor,
        addend: Option<&CudaTensor>,
        out: &CudaTensor,
        scales: Option<(&CudaTensor, &CudaTensor)>,
    ) -> Self {
        let binding = |t: &CudaTensor| t.handle.clone().binding();
        Self {
            x: binding(x),
            weight: binding(weight),
            addend: addend.map(binding),
            out: binding(out),
            scales: scales.map(|(x, w)| (binding(x), binding(w))),
            factor: 1.0,
        }
    }

    /// Device addresses, asked for on the server thread.
    fn addresses(self, server: &mut Server) -> Addresses {
        let stream = StreamId::current();
        let mut address = |binding: Binding| -> u64 {
            // What is bound cannot have been freed; losing it means the device itself is lost.
            let resource = server.get_resource(binding, stream).expect("a bound buffer exists");
            resource.resource().ptr
        };
        Addresses {
            x: address(self.x),
            weight: address(self.weight),
            addend: self.addend.map(&mut address),
            out: address(self.out),
            scales: self.scales.map(|(x, w)| (address(x), address(w))),
            factor: self.factor,
        }
    }
}

struct Addresses {
    x: u64,
    weight: u64,
    addend: Option<u64>,
    out: u64,
    scales: Option<(u64, u64)>,
    factor: f32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    /// Products of one shape, their operands behind one another.
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
    input: DType,
    output: DType,
}

impl Key {
    fn error(&self, call: &'static str) -> impl FnOnce(String) -> GemmError {
        let Key { m, n, k, .. } = *self;
        move |code| GemmError::Call { call, m, k, n, code }
    }
}

/// A chosen algorithm with its descriptors; lives as long as the process.
#[derive(Clone, Copy)]
struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// The library's state on one device, only touched on CubeCL's server thread for it.
struct Library {
    handle: sys::cublasLtHandle_t,
    context: cuda::CUcontext,
    stream: cuda::CUstream,
    before: cuda::CUevent,
    after: cuda::CUevent,
    workspace: u64,
    plans: HashMap<Key, Plan>,
}

// SAFETY: the raw handles are process-wide tokens of CUDA, valid on every thread; a mutex guards their use.
unsafe impl Send for Library {}

struct Engine {
    library: Arc<Mutex<Library>>,
    server: DeviceHandle<Server>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn engine(device: &CudaDevice) -> Result<Arc<Engine>, GemmError> {
    type Engines = HashMap<usize, Result<Arc<Engine>, GemmError>>;
    static ENGINES: LazyLock<Mutex<Engines>> = LazyLock::new(Default::default);
    lock(&ENGINES)
        .entry(device.index)
        .or_insert_with(|| Engine::new(device).map(Arc::new))
        .clone()
}

impl Engine {
    fn new(device: &CudaDevice) -> Result<Self, GemmError> {
        // SAFETY: only tries to open the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(GemmError::LibraryMissing);
        }
        // The client makes sure that the device's server exists.
        let _client = CudaRuntime::client(device);
        let server = DeviceHandle::<Server>::new(device.to_id());
        let library = server
            .submit_blocking(|_| Library::new())
            .map_err(|error| setup_error("starting the device's server")(format!("{error:?}")))??;
        Ok(Self {
            library: Arc::new(Mutex::new(library)),
            server,
        })
    }

    /// Queues the product; the first of its shape waits for the choice of an algorithm, so that a refusal is known here.
    fn submit(&self, key: Key, operands: Operands) -> Result<(), GemmError> {
        if !lock(&self.library).plans.contains_key(&key) {
            let library = self.library.clone();
            self.server
                .submit_blocking(move |_| lock(&library).plan(key))
                .map_err(|error| key.error("planning")(format!("{error:?}")))??;
        }
        let library = self.library.clone();
        self.server.submit(move |server| {
            let addresses = operands.addresses(server);
            // What fails here fails for the whole device; CubeCL reports a panic of its server on the next synchronisation.
            if let Err(error) = lock(&library).run(key, &addresses) {
                panic!("{error}");
            }
        });
        Ok(())
    }
}

fn setup_error(call: &'static str) -> impl FnOnce(String) -> GemmError {
    move |code| GemmError::Call {
        call,
        m: 0,
        k: 0,
        n: 0,
        code,
    }
}

impl Library {
    /// Runs on the server thread, where the device's context is current.
    fn new() -> Result<Self, GemmError> {
        let mut context = std::ptr::null_mut();
        let flags = cuda::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        // SAFETY: plain creations in the current context; every result is checked.
        unsafe {
            cuda::cuCtxGetCurrent(&mut context)
                .result()
                .map_err(|e| setup_error("cuCtxGetCurrent")(format!("{e:?}")))?;
            let event = || driver::event::create(flags).map_err(|e| setup_error("cuEventCreate")(format!("{e:?}")));
            Ok(Self {
                handle: lt::create_handle().map_err(|e| setup_error("cublasLtCreate")(format!("{e:?}")))?,
                context,
                stream: driver::stream::create(driver::stream::StreamKind::NonBlocking)
                    .map_err(|e| setup_error("cuStreamCreate")(format!("{e:?}")))?,
                before: event()?,
                after: event()?,
                workspace: driver::malloc_sync(WORKSPACE_BYTES)
                    .map_err(|e| setup_error("cuMemAlloc")(format!("{e:?}")))?,
                plans: HashMap::new(),
            })
        }
    }

    fn plan(&mut self, key: Key) -> Result<(), GemmError> {
        use sys::cublasLtMatmulDescAttributes_t::{
            CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_DESC_TRANSA,
        };
        use sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let Key {
            batch,
            m,
            n,
            k,
            input,
            output,
        } = key;
        let (input, output) = (data_type(input), data_type(output));
        let layout = |kind, rows: usize, columns: usize| {
            let layout = lt::create_matrix_layout(kind, rows as u64, columns as u64, rows as i64)
                .map_err(|e| key.error("cublasLtMatrixLayoutCreate")(format!("{e:?}")))?;
            let (count, distance) = (batch as i32, (rows * columns) as i64);
            // SAFETY: the addresses and sizes of live values of the documented types.
            unsafe {
                lt::set_matrix_layout_attribute(layout, BATCH_COUNT, (&raw const count).cast(), size_of::<i32>())
                    .and_then(|()| {
                        let distance = (&raw const distance).cast();
                        lt::set_matrix_layout_attribute(layout, BATCH_DISTANCE, distance, size_of::<i64>())
                    })
                    .map_err(|e| key.error("cublasLtMatrixLayoutSetAttribute")(format!("{e:?}")))?;
            }
            Ok(layout)
        };
        let (arithmetic, scalar) = match key.input {
            DType::F64 => (
                sys::cublasComputeType_t::CUBLAS_COMPUTE_64F,
                sys::cudaDataType_t::CUDA_R_64F,
            ),
            _ => (
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cudaDataType_t::CUDA_R_32F,
            ),
        };
        let workspace = WORKSPACE_BYTES;
        // SAFETY: attributes are passed with the address and size of a live value of the documented type.
        let plan = unsafe {
            let product = lt::create_matmul_desc(arithmetic, scalar)
                .map_err(|e| key.error("cublasLtMatmulDescCreate")(format!("{e:?}")))?;
            let described = set(product, CUBLASLT_MATMUL_DESC_TRANSA, &OP_T).and_then(|()| match key.input {
                DType::U8 => set(product, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &SCALE_PER_ROW)
                    .and_then(|()| set(product, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &SCALE_PER_ROW))
                    // The choice of an algorithm wants to see addresses; each run sets its own.
                    .and_then(|()| set(product, A_SCALE_POINTER, &self.workspace))
                    .and_then(|()| set(product, B_SCALE_POINTER, &self.workspace)),
                _ => Ok(()),
            });
            described.map_err(|e| key.error("cublasLtMatmulDescSetAttribute")(format!("{e:?}")))?;
            let (weight, x, out) = (layout(input, k, n)?, layout(input, k, m)?, layout(output, n, m)?);
            let preference =
                lt::create_matmul_pref().map_err(|e| key.error("cublasLtMatmulPreferenceCreate")(format!("{e:?}")))?;
            lt::set_matmul_pref_attribute(
                preference,
                CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const workspace).cast(),
                size_of::<usize>(),
            )
            .map_err(|e| key.error("cublasLtMatmulPreferenceSetAttribute")(format!("{e:?}")))?;
            let found = lt::get_matmul_algo_heuristic(self.handle, product, weight, x, out, out, preference)
                .map_err(|e| key.error("cublasLtMatmulAlgoGetHeuristic")(format!("{e:?}")))?;
            lt::destroy_matmul_pref(preference)
                .map_err(|e| key.error("cublasLtMatmulPreferenceDestroy")(format!("{e:?}")))?;
            Plan {
                product,
                weight,
                x,
                out,
                algorithm: found.algo,
            }
        };
        self.plans.insert(key, plan);
        Ok(())
    }

    fn run(&mut self, key: Key, at: &Addresses) -> Result<(), GemmError> {
        let Some(plan) = self.plans.get(&key) else {
            return Err(key.error("looking up the plan")("it was never made".into()));
        };
        // One and the other factor, as wide as the sums.
        let beta = if at.addend.is_some() { 1.0 } else { 0.0 };
        let (narrow, wide) = ([at.factor, beta as f32], [f64::from(at.factor), beta]);
        let [alpha, beta]: [*const c_void; 2] = match key.input {
            DType::F64 => [(&raw const wide[0]).cast(), (&raw const wide[1]).cast()],
            _ => [(&raw const narrow[0]).cast(), (&raw const narrow[1]).cast()],
        };
        // SAFETY: pointers and layouts belong to live tensors of the planned shape; events and streams to this context.
        unsafe {
            if let Some((x, weight)) = at.scales {
                for (attribute, address) in [(A_SCALE_POINTER, weight), (B_SCALE_POINTER, x)] {
                    set(plan.product, attribute, &address)
                        .map_err(|e| key.error("cublasLtMatmulDescSetAttribute")(format!("{e:?}")))?;
                }
            }
            cuda::cuCtxRecordEvent(self.context, self.before)
                .result()
                .and_then(|()| cuda::cuStreamWaitEvent(self.stream, self.before, 0).result())
                .map_err(|e| key.error("cuCtxRecordEvent")(format!("{e:?}")))?;
            lt::matmul(
                self.handle,
                plan.product,
                alpha,
                beta,
                at.weight as *const c_void,
                plan.weight,
                at.x as *const c_void,
                plan.x,
                at.addend.unwrap_or(at.out) as *const c_void,
                plan.out,
                at.out as *mut c_void,
                plan.out,
                &plan.algorithm,
                self.workspace as *mut c_void,
                WORKSPACE_BYTES,
                self.stream as sys::cudaStream_t,
            )
            .map_err(|e| key.error("cublasLtMatmul")(format!("{e:?}")))?;
            cuda::cuEventRecord(self.after, self.stream)
                .result()
                .and_then(|()| cuda::cuCtxWaitEvent(self.context, self.after).result())
                .map_err(|e| key.error("cuCtxWaitEvent")(format!("{e:?}")))
        }
    }
}

fn data_type(dtype: DType) -> sys::cudaDataType_t {
    match dtype {
        DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::U8 => sys::cudaDataType_t::CUDA_R_8F_E4M3,
        DType::F64 => sys::cudaDataType_t::CUDA_R_64F,
        _ => sys::cudaDataType_t::CUDA_R_32F,
    }
}
