// The way of a stream through the compressor: window, gate, burst compressor, packer. What the next
// bytes of a packet are is said from outside, step by step: values of a burst, or raw bytes.
module gw_compression_engine (
    input logic       clk,
    input logic       rst,
    input logic [2:0] settings,  // param_a of the codec; may change while no packet is inside

    input  logic [255:0] s_axis_tdata,
    input  logic [ 31:0] s_axis_tkeep,
    input  logic         s_axis_tlast,
    input  logic         s_axis_tvalid,
    output logic         s_axis_tready,
    output logic [255:0] m_axis_tdata,
    output logic [ 31:0] m_axis_tkeep,
    output logic         m_axis_tlast,
    output logic [  3:0] m_axis_tuser,
    output logic         m_axis_tvalid,
    input  logic         m_axis_tready,

    // The next bytes, as gw_byte_window shows them, and the step that is made of them.
    output logic [271:0] bytes,
    output logic [  5:0] available,
    output logic         ended,
    input  logic         step_raw,
    input  logic [  5:0] step_raw_size,
    input  logic [  3:0] step_present,  // values of the burst, 0 to 8
    input  logic         step_last,
    input  logic         step_padding,
    output logic         taken,     // the step is done,
    output logic         finished,  // and the packet with it
    output logic [  5:0] take       // the bytes that it used up, unless the packet is finished
);
    wire broken, settled, advance, take_all;
    wire unused_user;
    gw_byte_window window (
        .s_axis_tuser(1'b0),
        .user(unused_user),
        .*
    );

    assign take = step_raw ? step_raw_size : {step_present, 2'd0};
    wire item_last, item_valid, item_ready;
    wire [2:0] item_reason;
    gw_step_gate gate (
        .need       (take),
        .last       (step_last),
        .padding    (step_padding),
        .step_reason(!step_raw && settings[1:0] == 2'd3 ? 3'd5 : 3'd0),
        .*
    );

    assign finished = taken && item_last;

    wire fault = item_reason != 3'd0;
    wire [271:0] i_bytes;
    wire [5:0] i_raw_size;
    wire [3:0] i_present, i_user;
    wire i_raw, i_last, i_valid, i_ready;
    gw_stage #(
        .WIDTH(288)
    ) item (
        .clk,
        .rst,
        .in({
            bytes,
            fault || step_raw,
            fault ? 6'd0 : step_raw_size,
            step_present,
            item_last,
            !step_raw,
            item_reason
        }),
        .in_valid(item_valid),
        .in_ready(item_ready),
        .out({i_bytes, i_raw, i_raw_size, i_present, i_last, i_user}),
        .out_valid(i_valid),
        .out_ready(i_ready)
    );

    wire [271:0] burst_bytes;
    wire [5:0] burst_size;
    wire [3:0] burst_user;
    wire burst_last, burst_valid, burst_ready;
    gw_burst_compressor compressor (
        .clk,
        .rst,
        .settings,
        .in_bytes   (i_bytes),
        .in_raw     (i_raw),
        .in_raw_size(i_raw_size),
        .in_present (i_present),
        .in_last    (i_last),
        .in_user    (i_user),
        .in_valid   (i_valid),
        .in_ready   (i_ready),
        .out_bytes  (burst_bytes),
        .out_size   (burst_size),
        .out_last   (burst_last),
        .out_user   (burst_user),
        .out_valid  (burst_valid),
        .out_ready  (burst_ready)
    );
    gw_byte_packer packer (
        .in_bytes(burst_bytes),
        .in_size (burst_size),
        .in_last (burst_last),
        .in_user (burst_user),
        .in_valid(burst_valid),
        .in_ready(burst_ready),
        .*
    );
endmodule
