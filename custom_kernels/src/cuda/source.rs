//! CUDA C++ text as a kernel of the CUDA runtime.
//!
//! Parameters of the entry point: tensor maps by value, one pointer per tensor map, buffers in order, then one struct
//! whose bytes are the `info` words.

use std::sync::Arc;

use cubecl::cuda::{CudaCompiler, CudaRuntime};
use cubecl::prelude::*;
use cubecl::server::{KernelArguments, MetadataBindingInfo};
use cubecl::{CompilationError, Compiler, CubeTask};
use cubecl_cpp::shared::{Elem, Item, SharedMemory};

/// Alignment of dynamic shared memory that 128-byte-swizzled tiles need.
const SHARED_ALIGNMENT: usize = 1024;

/// Two fields of 32 bits as one word of a kernel's `info`.
pub(super) fn word(low: usize, high: usize) -> u64 {
    low as u64 | ((high as u64) << 32)
}

/// A kernel text, its entry point and launch shape.
#[derive(Clone)]
pub(super) struct CudaSource {
    pub(super) entry: &'static str,
    /// Everything that decides the code; part of the kernel's identity, in memory and in the compiled-kernel cache.
    pub(super) text: Arc<str>,
    pub(super) threads: u32,
    /// Dynamic shared memory in bytes, up to what one block may opt in to.
    pub(super) shared_bytes: usize,
}

impl CudaSource {
    /// The text behind `#define`s and the shared header.
    pub(super) fn text(defines: &[(&str, &str)], body: &str) -> Arc<str> {
        let defines: String = defines
            .iter()
            .map(|(name, value)| format!("#define {name} {value}\n"))
            .collect();
        (defines + include_str!("common.cuh") + body).into()
    }

    /// Queues the kernel on `client`'s stream.
    ///
    /// # Safety
    /// `arguments` must be what the entry point takes, and every access it makes inside the buffers.
    pub(super) unsafe fn launch(
        &self,
        client: &ComputeClient<CudaRuntime>,
        grid: (usize, usize, usize),
        arguments: KernelArguments,
        info: Vec<u64>,
    ) {
        let words = info.len();
        let count = CubeCount::Static(grid.0 as u32, grid.1 as u32, grid.2 as u32);
        let arguments = arguments.with_info(MetadataBindingInfo::new(info, words));
        // SAFETY: the caller's promise.
        unsafe { client.launch_unchecked(Box::new(self.clone()), count, arguments) };
    }
}

impl KernelMetadata for CudaSource {
    fn id(&self) -> KernelId {
        KernelId::new::<Self>()
            .info((self.entry, self.text.clone(), self.shared_bytes))
            .cube_dim(CubeDim::new_1d(self.threads))
    }

    fn address_type(&self) -> StorageType {
        u32::as_type_native_unchecked().storage_type()
    }
}

impl CubeTask<CudaCompiler> for CudaSource {
    fn compile(
        &self,
        compiler: &mut CudaCompiler,
        options: &<CudaCompiler as Compiler>::CompilationOptions,
        mode: ExecutionMode,
        address: StorageType,
    ) -> Result<CompiledKernel<CudaCompiler>, CompilationError> {
        let cube_dim = CubeDim::new_1d(self.threads);
        // The runtime reads the shared memory size from a compiled representation: that of an empty kernel will do.
        let empty = KernelDefinition {
            buffers: vec![],
            tensor_maps: vec![],
            scalars: vec![],
            cube_dim,
            body: Scope::root(false),
            options: Default::default(),
        };
        let mut representation = compiler.compile(empty, options, mode, address)?;
        if self.shared_bytes > 0 {
            representation.body.shared_memories.push(SharedMemory::new_array(
                0,
                Item::scalar(Elem::U8, true),
                self.shared_bytes,
                SHARED_ALIGNMENT,
            ));
        }
        Ok(CompiledKernel {
            entrypoint_name: self.entry.into(),
            debug_name: Some(self.entry),
            source: self.text.to_string(),
            repr: Some(representation),
            cube_dim,
            debug_info: None,
        })
    }
}
