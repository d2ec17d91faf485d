//! `out[m, n] = x[m, k] w[n, k]^T (+ addend)` through cuBLASLt, float32 accumulation, the sum rounded once.
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

use super::CudaTensor;
use crate::cube::empty;

type Server = <CudaRuntime as Runtime>::Server;

/// Room for split reductions; what cuBLAS itself recommends on Hopper is 32 MiB, twice that covers every shape seen.
const WORKSPACE_BYTES: usize = 64 << 20;

/// `CUBLAS_OP_T`, a transposed operand, in the library's C interface.
const OP_T: i32 = 1;

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
        m,
        n,
        k,
        input: x.dtype,
        output: dtype,
    };
    engine.submit(key, x, weight, addend, &out).ok()?;
    Some(out)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
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
    fn submit(
        &self,
        key: Key,
        x: &CudaTensor,
        weight: &CudaTensor,
        addend: Option<&CudaTensor>,
        out: &CudaTensor,
    ) -> Result<(), GemmError> {
        if !lock(&self.library).plans.contains_key(&key) {
            let library = self.library.clone();
            self.server
                .submit_blocking(move |_| lock(&library).plan(key))
                .map_err(|error| key.error("planning")(format!("{error:?}")))??;
        }
        let binding = |t: &CudaTensor| t.handle.clone().binding();
        let (x, weight, addend, out) = (binding(x), binding(weight), addend.map(binding), binding(out));
        let library = self.library.clone();
        self.server.submit(move |server| {
            let stream = StreamId::current();
            let mut pointer =
                |binding: Binding| -> Option<u64> { Some(server.get_resource(binding, stream).ok()?.resource().ptr) };
            let addresses = (pointer(x), pointer(weight), pointer(out));
            let addend = addend.map(&mut pointer);
            let (Some(x), Some(weight), Some(out)) = addresses else {
                panic!("a buffer of a queued product is gone");
            };
            let addend = addend.map(|c| c.expect("a buffer of a queued product is gone"));
            // What fails here fails for the whole device; CubeCL reports a panic of its server on the next synchronisation.
            if let Err(error) = lock(&library).run(key, x, weight, addend, out) {
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
        use sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        use sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let Key { m, n, k, input, output } = key;
        let (input, output) = (data_type(input), data_type(output));
        let layout = |kind, rows: usize, columns: usize| {
            lt::create_matrix_layout(kind, rows as u64, columns as u64, rows as i64)
                .map_err(|e| key.error("cublasLtMatrixLayoutCreate")(format!("{e:?}")))
        };
        let (transpose, workspace) = (OP_T, WORKSPACE_BYTES);
        // SAFETY: attributes are passed with the address and size of a live value of the documented type.
        let plan = unsafe {
            let product = lt::create_matmul_desc(
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cudaDataType_t::CUDA_R_32F,
            )
            .map_err(|e| key.error("cublasLtMatmulDescCreate")(format!("{e:?}")))?;
            lt::set_matmul_desc_attribute(
                product,
                CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transpose).cast(),
                size_of_val(&transpose),
            )
            .map_err(|e| key.error("cublasLtMatmulDescSetAttribute")(format!("{e:?}")))?;
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

    fn run(&mut self, key: Key, x: u64, weight: u64, addend: Option<u64>, out: u64) -> Result<(), GemmError> {
        let Some(plan) = self.plans.get(&key) else {
            return Err(key.error("looking up the plan")("it was never made".into()));
        };
        let alpha = 1.0f32;
        let beta = if addend.is_some() { 1.0f32 } else { 0.0f32 };
        // SAFETY: pointers and layouts belong to live tensors of the planned shape; events and streams to this context.
        unsafe {
            cuda::cuCtxRecordEvent(self.context, self.before)
                .result()
                .and_then(|()| cuda::cuStreamWaitEvent(self.stream, self.before, 0).result())
                .map_err(|e| key.error("cuCtxRecordEvent")(format!("{e:?}")))?;
            lt::matmul(
                self.handle,
                plan.product,
                (&raw const alpha).cast::<c_void>(),
                (&raw const beta).cast::<c_void>(),
                weight as *const c_void,
                plan.weight,
                x as *const c_void,
                plan.x,
                addend.unwrap_or(out) as *const c_void,
                plan.out,
                out as *mut c_void,
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
        _ => sys::cudaDataType_t::CUDA_R_32F,
    }
}
