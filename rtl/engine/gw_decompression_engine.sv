// The way of a stream through the decompressor: window, gate, burst decompressor, packer. What the
// next bytes of a packet are is said from outside, step by step: a burst, or raw bytes.
module gw_decompression_engine #(
    parameter int USER_BITS = 1
) (
    input logic clk,
    input logic rst,

    input  logic [        255:0] s_axis_tdata,
    input  logic [         31:0] s_axis_tkeep,
    input  logic                 s_axis_tlast,
    input  logic [USER_BITS-1:0] s_axis_tuser,
    input  logic                 s_axis_tvalid,
    output logic                 s_axis_tready,
    output logic [        255:0] m_axis_tdata,
    output logic [         31:0] m_axis_tkeep,
    output logic                 m_axis_tlast,
    output logic [          3:0] m_axis_tuser,
    output logic                 m_axis_tvalid,
    input  logic                 m_axis_tready,

    // The next bytes, as gw_byte_window shows them, and the step that is made of them.
    output logic [        271:0] bytes,
    output logic [          5:0] available,
    output logic                 ended,
    output logic [USER_BITS-1:0] user,
    input  logic                 step_raw,
    input  logic [          5:0] step_raw_size,
    input  logic [          3:0] step_present,  // values of the burst, 0 to 8
    input  logic                 step_last,
    input  logic                 step_padding,
    output logic                 taken,     // the step is done,
    output logic                 finished,  // and the packet with it
    output logic [          5:0] take       // the bytes that it used up, unless the packet is finished
);
    wire broken, settled, advance, take_all;
    gw_byte_window #(.USER_BITS(USER_BITS)) window (.*);

    wire [5:0] burst_size;
    wire absent_tag;
    gw_burst_size tag_decoder (
        .tags(bytes[15:0]),
        .present(step_present),
        .size(burst_size),
        .absent_tag
    );

    // A burst without values has no tags either. Tags that the packet does not have mean nothing.
    wire empty = step_present == 4'd0;
    wire wrong_tag = !step_raw && !empty && absent_tag && available >= 6'd2;
    assign take = step_raw ? step_raw_size : empty ? 6'd0 : burst_size;
    wire item_last, item_valid, item_ready;
    wire [2:0] item_reason;
    gw_step_gate gate (
        .need       (take),
        .last       (step_last),
        .padding    (step_padding),
        .step_reason(wrong_tag ? 3'd4 : 3'd0),
        .*
    );

    assign finished = taken && item_last;

    wire fault = item_reason != 3'd0;
    wire [271:0] i_bytes;
    wire [5:0] i_size;
    wire [3:0] i_user;
    wire i_raw, i_last, i_valid, i_ready;
    gw_stage #(
        .WIDTH(284)
    ) item (
        .clk,
        .rst,
        .in({
            bytes,
            step_raw,
            fault ? 6'd0 : step_raw ? step_raw_size : {step_present, 2'd0},
            item_last,
            !step_raw,
            item_reason
        }),
        .in_valid(item_valid),
        .in_ready(item_ready),
        .out({i_bytes, i_raw, i_size, i_last, i_user}),
        .out_valid(i_valid),
        .out_ready(i_ready)
    );

    wire [271:0] values;
    wire [5:0] values_size;
    wire [3:0] values_user;
    wire values_last, values_valid, values_ready;
    gw_burst_decompressor decompressor (
        .clk,
        .rst,
        .in_bytes (i_bytes),
        .in_raw   (i_raw),
        .in_size  (i_size),
        .in_last  (i_last),
        .in_user  (i_user),
        .in_valid (i_valid),
        .in_ready (i_ready),
        .out_bytes(values),
        .out_size (values_size),
        .out_last (values_last),
        .out_user (values_user),
        .out_valid(values_valid),
        .out_ready(values_ready)
    );
    gw_byte_packer packer (
        .in_bytes(values),
        .in_size (values_size),
        .in_last (values_last),
        .in_user (values_user),
        .in_valid(values_valid),
        .in_ready(values_ready),
        .*
    );
endmodule
