//! Bytes from mapped files straight to the card, without a copy of the whole on the host.

use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::device::Device;
use cubecl::device_handle::DeviceHandle;
use cubecl::prelude::*;
use cubecl::server::{ComputeServer, Handle};
use cubecl::stream_id::StreamId;
use cudarc::driver::{result as driver, sys as cuda};

type Server = <CudaRuntime as Runtime>::Server;

fn cuda_idle() -> cuda::CUresult {
    // SAFETY: waits for the context that is current on the device's server thread.
    unsafe { cuda::cuCtxSynchronize() }
}

/// A buffer of `size` bytes with `pieces` in their places, each within it. Waits for the device, whose memory may still be
/// in use by what was queued before.
///
/// # Panics
/// When the device is lost, or a piece does not fit.
pub(super) fn upload(
    client: &ComputeClient<CudaRuntime>,
    size: usize,
    pieces: &mut dyn Iterator<Item = (usize, &[u8])>,
    device: &CudaDevice,
) -> Handle {
    let pieces: Vec<(usize, &[u8])> = pieces.collect();
    assert!(
        pieces.iter().all(|(at, bytes)| at + bytes.len() <= size),
        "a piece lies beyond the {size} bytes of its buffer"
    );
    let handle = client.empty(size);
    let binding = handle.clone().binding();
    DeviceHandle::<Server>::new(device.to_id())
        .submit_blocking(move |server| {
            let resource = server
                .get_resource(binding, StreamId::current())
                .expect("a bound buffer exists");
            let start = resource.resource().ptr;
            let idle = || cuda_idle().result();
            let copy = |(at, bytes): &(usize, &[u8])| {
                // SAFETY: the destination was just allocated with `size` bytes and the piece lies within it; the source is
                // borrowed until this call returns, which is after the copy.
                unsafe { driver::memcpy_htod_sync(start + *at as u64, bytes) }
            };
            // A copy may still be on its way from the driver's own buffers when its call returns.
            let copied = idle()
                .and_then(|()| pieces.iter().try_for_each(copy))
                .and_then(|()| idle());
            copied.expect("the device takes the bytes");
        })
        .expect("the device's server answers");
    handle
}
